"""Several runs side by side: who reaches the same quality, and how much sooner."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flwr_hetero.core.errors import invalid
from flwr_hetero.report.history import History, read_history
from flwr_hetero.report.progress import (
    best_round,
    lower_is_better,
    settled_value,
    time_to_target,
)

NEAR = 0.99
"""Share of the settled value that is the default target."""


class NamedRun(NamedTuple):
    """A run to compare.

    Parameters
    ----------
    name : str
        Short and unlike those of the other runs.
    history : History
        Its rounds.
    """

    name: str
    history: History


class Row(NamedTuple):
    """A run in the comparison.

    Parameters
    ----------
    name : str
        As of the run.
    rounds : int
        Number of its last round.
    final, best : float
        Last and best value of the metric.
    total : float
        What the whole run cost by the clock of the comparison.
    to_target : float or None
        What it cost to reach the target; None if it never did.
    speed_up : float or None
        Cost of the baseline divided by that of this run, both up to the target; None if one
        of them never reached it.
    """

    name: str
    rounds: int
    final: float
    best: float
    total: float
    to_target: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Comparison:
    """Runs, what they are judged by, and the outcome.

    Parameters
    ----------
    runs : tuple of NamedRun
        In the order of the rows.
    metric : str
        What is compared.
    target : float
        The value to reach.
    clock : {"virtual_s", "wall_s", "round"}
        What it may cost.
    baseline : str
        Name of the run that the others are measured against.
    rows : tuple of Row
        One per run.
    falls : bool
        Whether lower is better.
    """

    runs: tuple[NamedRun, ...]
    metric: str
    target: float
    clock: str
    baseline: str
    rows: tuple[Row, ...]
    falls: bool


def read_runs(directories: Sequence[str | Path]) -> tuple[NamedRun, ...]:
    """Read the histories of several runs.

    Parameters
    ----------
    directories : sequence of str or Path
        Run directories.

    Returns
    -------
    tuple of NamedRun
        Named after their folders, with as many parents as tell them apart.

    Raises
    ------
    ValueError
        If a directory is missing, holds no rounds, or is named twice.
    """
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other", "name each once")
    histories = [read_history(path) for path in paths]
    for path, history in zip(paths, histories, strict=True):
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round", "leave it out")
    return tuple(map(NamedRun, _short_names(paths), histories))


def compare(
    runs: Sequence[NamedRun],
    metric: str | None = None,
    target: float | None = None,
    *,
    baseline: str | None = None,
    clock: str = "virtual_s",
    falls: bool | None = None,
) -> Comparison:
    """Compare runs by the time that they need to reach a target.

    Parameters
    ----------
    runs : sequence of NamedRun
        At least one.
    metric : str, optional
        Metric that all of them have; the main metric of the first run if left out.
    target : float, optional
        Value to reach; :func:`default_target` if left out.
    baseline : str, optional
        Name of the run to measure against; the first if left out.
    clock : {"virtual_s", "wall_s", "round"}, keyword-only
        What to measure by.
    falls : bool, optional, keyword-only
        Whether lower is better; :func:`~flwr_hetero.report.progress.lower_is_better` if left out.

    Returns
    -------
    Comparison
        With a row per run.

    Raises
    ------
    ValueError
        If a run lacks the metric, or the baseline is not among the runs.
    """
    names = [run.name for run in runs]
    first = names[0] if baseline is None else baseline
    if first not in names:
        raise invalid("baseline", first, f"be one of the runs {', '.join(names)}", "choose one")
    judged = metric or runs[0].history.main_metric()
    if judged is None:
        raise invalid("metric", metric, "be in the history, which has none", "evaluate the model")
    for run in runs:
        _check_metric(run, judged)
    down = lower_is_better(judged) if falls is None else falls
    goal = default_target(runs, judged, falls=down) if target is None else target
    costs = {run.name: time_to_target(run.history, judged, goal, clock, falls=down) for run in runs}
    rows = [_row(run, judged, clock, down, costs[run.name], costs[first]) for run in runs]
    return Comparison(tuple(runs), judged, goal, clock, first, tuple(rows), down)


def default_target(runs: Sequence[NamedRun], metric: str, *, falls: bool | None = None) -> float:
    """Choose a value that every run reaches: 1 % short of what all of them hold at their end.

    Parameters
    ----------
    runs : sequence of NamedRun
        At least one.
    metric : str
        What is compared.
    falls : bool, optional
        As for :func:`compare`.

    Returns
    -------
    float
        Of the runs' settled values (median of the last five evaluations) the worst, times
        0.99, or divided by it for losses.

    Notes
    -----
    A curve creeps through its last percent, so the time to reach its very end says more about
    noise than about the method; and one lucky round at the end must not set the target.
    """
    down = lower_is_better(metric) if falls is None else falls
    settled = [settled_value(run.history, metric, falls=down) for run in runs]
    return max(settled) / NEAR if down else min(settled) * NEAR


def _row(
    run: NamedRun,
    metric: str,
    clock: str,
    falls: bool,
    cost: float | None,
    baseline_cost: float | None,
) -> Row:
    values = run.history.metric(metric)
    times = run.history.column(clock)
    return Row(
        name=run.name,
        rounds=run.history.last_round,
        final=float(values[~np.isnan(values)][-1]),
        best=float(values[best_round(run.history, metric, falls=falls)]),
        total=float(times[-1]),
        to_target=cost,
        speed_up=baseline_cost / cost if cost and baseline_cost is not None else None,
    )


def _check_metric(run: NamedRun, metric: str) -> None:
    try:
        run.history.metric(metric)
    except ValueError:
        known = ", ".join(run.history.metrics()) or "none at all"
        rule = f"be in every run; {run.name} has {known}"
        raise invalid("metric", metric, rule, "choose one of those") from None


def _short_names(paths: Sequence[Path]) -> list[str]:
    longest = max(len(path.parts) for path in paths)
    for depth in range(1, longest + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
