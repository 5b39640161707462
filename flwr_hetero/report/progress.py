"""How far a run has come: its best and its settled value, and when it reached a target."""

import numpy as np

from flwr_hetero.core.errors import invalid
from flwr_hetero.report.history import History

CLOCKS = {
    "virtual_s": "time on the fleet's clock",
    "wall_s": "time on the server's clock",
    "round": "rounds",
}
"""What a run is measured by, as the history and as people call it."""
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


def lower_is_better(metric: str) -> bool:
    """Tell which way a metric improves.

    Parameters
    ----------
    metric : str
        Its name.

    Returns
    -------
    bool
        True for losses, errors and bounds.

    Examples
    --------
    >>> lower_is_better("train-loss"), lower_is_better("accuracy")
    (True, False)
    >>> lower_is_better("herding/herding-bound")
    True
    """
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def best_round(history: History, metric: str, *, falls: bool | None = None) -> int:
    """Find the position of a metric's best value.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.
    falls : bool, optional
        Whether lower is better; :func:`lower_is_better` if left out.

    Returns
    -------
    int
        Position in ``history.rounds``; the first if several are equally good.
    """
    values = history.metric(metric)
    return int(np.nanargmin(values) if _falls(metric, falls) else np.nanargmax(values))


def settled_value(
    history: History, metric: str, last: int = 5, *, falls: bool | None = None
) -> float:
    """Return the level that a run holds at its end.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.
    last : int
        Evaluations that count.
    falls : bool, optional
        As for :func:`best_round`.

    Returns
    -------
    float
        Median of the last evaluations: one of them, so that the run has reached it. Of an even
        number it is the worse of the two in the middle.
    """
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-last:].tolist(), reverse=_falls(metric, falls))
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History,
    metric: str,
    target: float,
    clock: str = "virtual_s",
    *,
    falls: bool | None = None,
) -> float | None:
    """Tell when a run first reaches a target.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.
    target : float
        The value to reach.
    clock : {"virtual_s", "wall_s", "round"}
        What to measure by.
    falls : bool, optional
        Whether the metric must fall to the target, or rise; as for :func:`best_round`.

    Returns
    -------
    float or None
        Seconds since the start, or the round; None if the target is never reached.

    Raises
    ------
    ValueError
        If the metric or the clock is unknown, or the target not finite.

    Examples
    --------
    >>> history = History(
    ...     (
    ...         {"round": 0, "virtual_s": 0.0, "global": {"accuracy": 0.1}},
    ...         {"round": 1, "virtual_s": 18.0, "global": {"accuracy": 0.6}},
    ...     )
    ... )
    >>> time_to_target(history, "accuracy", 0.5)
    18.0
    """
    if clock not in CLOCKS:
        raise invalid("clock", clock, f"be one of {', '.join(CLOCKS)}", "choose one")
    if not np.isfinite(target):
        raise invalid("target", target, "be a finite number", "leave it out for the default")
    values, times = history.metric(metric), history.column(clock)
    with np.errstate(invalid="ignore"):
        reached = values <= target if _falls(metric, falls) else values >= target
    hits = times[reached & ~np.isnan(times)]
    return float(hits[0]) if len(hits) else None


def _falls(metric: str, falls: bool | None) -> bool:
    return lower_is_better(metric) if falls is None else falls
