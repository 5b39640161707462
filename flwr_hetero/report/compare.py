"""Several runs side by side: who reaches the same quality, and how much sooner."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.report.history import (
    CLOCKS,
    History,
    best_round,
    lower_is_better,
    read_history,
    settled_value,
    time_to_target,
)
from flwr_hetero.report.style import (
    WIDTH,
    duration,
    figure,
    heading,
    metric_axis,
    round_axis,
    run_look,
    time_unit,
    words,
    zoom,
)

NEAR = 0.99
"""Share of the settled value that is the default target."""


class NamedRun(NamedTuple):
    """A run to compare."""

    name: str
    history: History


class Row(NamedTuple):
    """A run in the comparison."""

    name: str
    rounds: int
    final: float
    best: float
    total: float
    to_target: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Comparison:
    """Runs, what they are judged by, and the outcome."""

    runs: tuple[NamedRun, ...]
    metric: str
    target: float
    clock: str
    baseline: str
    rows: tuple[Row, ...]
    falls: bool


def read_runs(directories: Sequence[str | Path]) -> tuple[NamedRun, ...]:
    """Read the histories of several runs."""
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other")
    histories = [read_history(path) for path in paths]
    for path, history in zip(paths, histories, strict=True):
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round")
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
    """Compare runs by the time that they need to reach a target."""
    names = [run.name for run in runs]
    first = names[0] if baseline is None else baseline
    check_choice("baseline", first, names)
    judged = metric or runs[0].history.main_metric()
    if judged is None:
        raise invalid("metric", metric, "be in the history, which has none")
    for run in runs:
        _check_metric(run, judged)
    down = lower_is_better(judged) if falls is None else falls
    goal = default_target(runs, judged, falls=down) if target is None else target
    costs = {run.name: time_to_target(run.history, judged, goal, clock, falls=down) for run in runs}
    rows = [_row(run, judged, clock, down, costs[run.name], costs[first]) for run in runs]
    return Comparison(tuple(runs), judged, goal, clock, first, tuple(rows), down)


def default_target(runs: Sequence[NamedRun], metric: str, *, falls: bool | None = None) -> float:
    """Choose a value that every run reaches: 1 % short of what all of them hold at their end.

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
        raise invalid("metric", metric, rule) from None


def _short_names(paths: Sequence[Path]) -> list[str]:
    longest = max(len(path.parts) for path in paths)
    for depth in range(1, longest + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the runs against time and rounds, and below it the cost of the target."""
    count = len(comparison.runs)
    bars_height = 0.9 + 0.36 * count
    drawn = Figure(figsize=(WIDTH, 4.1 + bars_height), layout="constrained")
    grid = drawn.add_gridspec(2, 2, height_ratios=[4.1, bars_height])
    by_time = drawn.add_subplot(grid[0, 0])
    by_round = drawn.add_subplot(grid[0, 1], sharey=by_time)
    cost = drawn.add_subplot(grid[1, :])
    _draw_runs(by_time, comparison, "wall_s" if comparison.clock == "wall_s" else "virtual_s")
    _draw_runs(by_round, comparison, "round")
    by_round.set_ylabel("")
    by_round.tick_params(labelleft=False)
    by_round.legend(loc="upper right" if comparison.falls else "lower right")
    _draw_costs(cost, comparison)
    return drawn


def cost_text(clock: str, cost: float) -> str:
    """Write a cost by a clock."""
    return f"{cost:.0f} rounds" if clock == "round" else duration(cost)


def _draw_runs(axes: Axes, comparison: Comparison, clock: str) -> None:
    times = {run.name: run.history.column(clock) for run in comparison.runs}
    longest = np.nanmax([np.nanmax(column, initial=0) for column in times.values()])
    unit = time_unit(float(longest))
    scale = 1.0 if clock == "round" else unit.seconds
    shown = []
    for number, run in enumerate(comparison.runs):
        x, values = times[run.name] / scale, run.history.metric(comparison.metric)
        known = ~np.isnan(values)
        axes.plot(x[known], values[known], **run_look(number), label=run.name)
        shown.append(values[known])
    axes.axhline(comparison.target, color="#8c8c8c", lw=1.2, ls=(0, (1, 1.5)))
    zoom(axes, np.concatenate(shown), falls=comparison.falls)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, comparison.target), max(high, comparison.target))
    metric_axis(axes, comparison.metric, np.concatenate([*shown, [comparison.target]]))
    name = CLOCKS[clock]
    axes.set_title(
        f"{heading(comparison.metric)} against {'rounds' if clock == 'round' else 'time'}"
    )
    if clock == "round":
        round_axis(axes)
    else:
        axes.set_xlabel(f"{name} ({unit.symbol})")


def _draw_costs(axes: Axes, comparison: Comparison) -> None:
    costs = [row.to_target for row in comparison.rows]
    longest = max((cost for cost in costs if cost is not None), default=0.0)
    unit = time_unit(longest)
    scale = 1.0 if comparison.clock == "round" else unit.seconds
    for number, row in enumerate(comparison.rows):
        cost = row.to_target
        colour = run_look(number)["color"]
        axes.barh(number, 0 if cost is None else cost / scale, color=colour, height=0.7)
        text = "never" if cost is None else cost_text(comparison.clock, cost)
        if row.speed_up is not None and row.name != comparison.baseline:
            text += f", {row.speed_up:.3g} x {'faster' if row.speed_up >= 1 else 'the speed'}"
        place = (0 if cost is None else cost / scale, number)
        axes.annotate(text, place, (6, 0), textcoords="offset points", va="center", size=9.5)
    axes.set_yticks(range(len(costs)), [row.name for row in comparison.rows])
    axes.set_ylim(len(costs) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * longest / scale if longest else 1)
    axes.grid(visible=False, axis="y")
    target = figure(comparison.metric, comparison.target)
    name = CLOCKS[comparison.clock].capitalize()
    axes.set_title(f"{name} to reach {words(comparison.metric)} {target}")
    axes.set_xlabel("rounds" if comparison.clock == "round" else unit.symbol)
