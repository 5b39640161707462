"""Several runs side by side: who reaches the same quality, and how much sooner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
    GREY,
    WIDTH,
    TimeUnit,
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

Runs: TypeAlias = Mapping[str, History]
"""Name to history."""


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

    runs: Runs
    metric: str
    target: float
    clock: str
    baseline: str
    rows: tuple[Row, ...]
    falls: bool


def read_runs(directories: Sequence[str | Path]) -> Runs:
    """Read the histories of several runs, named after their folders."""
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other")
    histories = [read_history(path) for path in paths]
    for path, history in zip(paths, histories, strict=True):
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        runs = {"/".join(p.parts[-depth:]): h for p, h in zip(paths, histories, strict=True)}
        if len(runs) == len(paths):
            break
    return runs


def compare(
    runs: Runs,
    metric: str | None = None,
    target: float | None = None,
    *,
    baseline: str | None = None,
    clock: str = "virtual_s",
    falls: bool | None = None,
) -> Comparison:
    """Compare runs by the time that they need to reach a target."""
    first = next(iter(runs)) if baseline is None else baseline
    check_choice("baseline", first, list(runs))
    if clock == "round" and len(units(runs)) > 1:
        rule = "be virtual or wall where one run counts rounds and another merges"
        raise invalid("clock", clock, rule)
    judged = metric or next(iter(runs.values())).main_metric()
    if judged is None:
        raise invalid("metric", metric, "be in the history, which has none")
    for name, run in runs.items():
        try:
            run.metric(judged)
        except ValueError:
            known = ", ".join(run.metrics()) or "none at all"
            raise invalid("metric", judged, f"be in every run; {name} has {known}") from None
    down = lower_is_better(judged) if falls is None else falls
    goal = default_target(runs, judged, falls=down) if target is None else target
    costs = {name: time_to_target(runs[name], judged, goal, clock, falls=down) for name in runs}
    rows = []
    for name, run in runs.items():
        values, cost, reference = run.metric(judged), costs[name], costs[first]
        row = Row(
            name=name,
            rounds=run.last_round,
            final=float(values[~np.isnan(values)][-1]),
            best=float(values[best_round(run, judged, falls=down)]),
            total=float(run.column(clock)[-1]),
            to_target=cost,
            speed_up=reference / cost if cost and reference is not None else None,
        )
        rows.append(row)
    return Comparison(runs, judged, goal, clock, first, tuple(rows), down)


def default_target(runs: Runs, metric: str, *, falls: bool) -> float:
    """Choose a value that every run reaches: 1 % short of what all of them hold at their end.

    Notes
    -----
    A curve creeps through its last percent, so the time to reach its very end says more about
    noise than about the method; and one lucky round at the end must not set the target.
    """
    settled = [settled_value(run, metric, falls=falls) for run in runs.values()]
    return max(settled) / NEAR if falls else min(settled) * NEAR


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the runs against time and rounds, and below it the cost of the target."""
    count = len(comparison.runs)
    bars_height = 0.9 + 0.36 * count
    drawn = Figure(figsize=(WIDTH, 4.1 + bars_height), layout="constrained")
    grid = drawn.add_gridspec(2, 2, height_ratios=[4.1, bars_height])
    mixed = len(units(comparison.runs)) > 1
    last = by_time = drawn.add_subplot(grid[0, :] if mixed else grid[0, 0])
    _draw_runs(by_time, comparison, "wall_s" if comparison.clock == "wall_s" else "virtual_s")
    if not mixed:  # a merge is no round
        last = drawn.add_subplot(grid[0, 1], sharey=by_time)
        _draw_runs(last, comparison, "round")
        last.set_ylabel("")
        last.tick_params(labelleft=False)
    last.legend(loc="upper right" if comparison.falls else "lower right")
    _draw_costs(drawn.add_subplot(grid[1, :]), comparison)
    return drawn


def units(runs: Runs) -> list[str]:
    """Return what the runs count: rounds, merges or both."""
    return sorted({f"{run.unit}s" for run in runs.values()}, reverse=True)


def cost_text(clock: str, cost: float | None, unit: str = "rounds") -> str:
    """Write a cost by a clock."""
    if cost is None:
        return "never"
    return f"{cost:.0f} {unit}" if clock == "round" else duration(cost)


def clock_text(clock: str, runs: Runs) -> str:
    """Name a clock."""
    return units(runs)[0] if clock == "round" else CLOCKS[clock]


def _unit(clock: str, longest: float, runs: Runs) -> TimeUnit:
    return TimeUnit(1.0, units(runs)[0]) if clock == "round" else time_unit(longest)


def _draw_runs(axes: Axes, comparison: Comparison, clock: str) -> None:
    times = {name: run.column(clock) for name, run in comparison.runs.items()}
    longest = max(np.nanmax(column, initial=0) for column in times.values())
    unit = _unit(clock, longest, comparison.runs)
    shown = []
    for number, (name, run) in enumerate(comparison.runs.items()):
        values = run.metric(comparison.metric)
        known = ~np.isnan(values)
        x = times[name][known] / unit.seconds
        axes.plot(x, values[known], **run_look(number), label=name)
        shown.append(values[known])
    axes.axhline(comparison.target, color=GREY, lw=1.2, ls=(0, (1, 1.5)))
    zoom(axes, np.concatenate(shown), falls=comparison.falls)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, comparison.target), max(high, comparison.target))
    metric_axis(axes, comparison.metric, np.concatenate([*shown, [comparison.target]]))
    against = unit.symbol if clock == "round" else "time"
    axes.set_title(f"{heading(comparison.metric)} against {against}")
    axes.set_xlabel(f"{CLOCKS[clock]} ({unit.symbol})")
    if clock == "round":
        round_axis(axes, unit.symbol.removesuffix("s"))


def _draw_costs(axes: Axes, comparison: Comparison) -> None:
    longest = max(row.to_target or 0.0 for row in comparison.rows)
    unit = _unit(comparison.clock, longest, comparison.runs)
    for number, row in enumerate(comparison.rows):
        width = (row.to_target or 0.0) / unit.seconds
        axes.barh(number, width, color=run_look(number)["color"], height=0.7)
        text = cost_text(comparison.clock, row.to_target, unit.symbol)
        if row.speed_up is not None and row.name != comparison.baseline:
            text += f", {row.speed_up:.3g} x {'faster' if row.speed_up >= 1 else 'the speed'}"
        end = (width, number)
        axes.annotate(text, end, (6, 0), textcoords="offset points", va="center", size=9.5)
    count = len(comparison.rows)
    axes.set_yticks(range(count), [row.name for row in comparison.rows])
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * longest / unit.seconds if longest else 1)
    axes.grid(visible=False, axis="y")
    target = figure(comparison.metric, comparison.target)
    clock = clock_text(comparison.clock, comparison.runs).capitalize()
    axes.set_title(f"{clock} to reach {words(comparison.metric)} {target}")
    axes.set_xlabel(unit.symbol)
