"""How far a run has come: its best and its settled value, and when it reached a target."""

import numpy as np

from flwr_hetero.core.errors import invalid
from flwr_hetero.report.history import History

CLOCKS = ("virtual_s", "wall_s", "round")
"""What a run is measured by: the fleet's clock, the server's clock, rounds."""
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae")


def lower_is_better(metric: str) -> bool:
    """Tell which way a metric improves.

    Parameters
    ----------
    metric : str
        Its name.

    Returns
    -------
    bool
        True for losses and errors.

    Examples
    --------
    >>> lower_is_better("train-loss"), lower_is_better("accuracy")
    (True, False)
    """
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def best_round(history: History, metric: str) -> int:
    """Find the position of a metric's best value.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.

    Returns
    -------
    int
        Position in ``history.rounds``; the first if several are equally good.
    """
    values = history.metric(metric)
    return int(np.nanargmin(values) if lower_is_better(metric) else np.nanargmax(values))


def settled_value(history: History, metric: str, last: int = 5) -> float:
    """Return the level that a run holds at its end.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.
    last : int
        Evaluations that count.

    Returns
    -------
    float
        Median of the last evaluations: one of them, so that the run has reached it. Of an even
        number it is the worse of the two in the middle.
    """
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-last:].tolist(), reverse=lower_is_better(metric))
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History, metric: str, target: float, clock: str = "virtual_s"
) -> float | None:
    """Tell when a run first reaches a target.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`; losses and errors must fall to the target, others rise.
    target : float
        The value to reach.
    clock : {"virtual_s", "wall_s", "round"}
        What to measure by.

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
        reached = values <= target if lower_is_better(metric) else values >= target
    hits = times[reached & ~np.isnan(times)]
    return float(hits[0]) if len(hits) else None
