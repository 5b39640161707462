"""``compare.html``: the page of a comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero.report import page
from flwr_hetero.report.compare import Comparison, Group
from flwr_hetero.report.compare.sentences import cost_text, times
from flwr_hetero.report.compare.verdict import Judge, first_reach
from flwr_hetero.report.curves import SUMS, Axis, Line, axes_of, column_of, curve_data
from flwr_hetero.report.history import CLOCKS
from flwr_hetero.report.style import figure, size, words
from flwr_hetero.report.tables import (
    Table,
    Value,
    cells,
    metric_value,
    number,
    seconds,
    tables_of,
    without_empty_columns,
)

# An axis is logarithmic if the fastest run needed less than this share of the slowest run's cost.
LEAST_SHARE = 0.2
# By this number a run that never reached the target is sorted last.
NEVER_REACHED = 1e300


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page, in one step; return its absolute path."""
    return page.write_page(comparison_data(comparison), Path(path).expanduser().absolute())


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return everything that the page of a comparison shows, for JSON."""
    judge = comparison.judge
    groups = comparison.groups
    lines = []
    for group in groups:
        label = f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label
        lines.append(Line(label, group.colour, [run.history for run in group.runs]))
    target = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    named = [(group.label, run.seed, run.history) for group in groups for run in group.runs]
    tables = [_settings_table(comparison), _runs_table(comparison, target), *tables_of(named)]
    base, *others = [group.label for group in groups]
    title = [f"{len(others)} kinds of runs"] if len(others) > 1 else others
    is_by_round = judge.clock == "round"
    costs = [[r.to_target for r in group.results if r.to_target is not None] for group in groups]
    has_seeds = any(len(group) > 1 for group in costs)
    logarithmic = _logarithmic_axes(groups, judge)
    curves = curve_data(lines, judge.metric, judge.clock, judge.target, logarithmic)
    histories = [history for _, _, history in named]
    axes = axes_of(histories, judge.clock, logarithmic)
    axis = next(a for a in [*axes, Axis("round", "rounds", 1.0)] if a.key == judge.clock)
    return {
        "kind": "comparison",
        "title": " against ".join([*title, base]),
        "where": ", ".join(str(run.path) for group in groups for run in group.runs),
        "sentences": list(comparison.sentences),
        "notes": _caveats(groups),
        "curves": curves,
        "costs": {
            "title": f"{'Rounds' if is_by_round else 'Time'} to {target}",
            "label": axis.label,
            "values": [[cost / axis.scale for cost in group] for group in costs],
            "caption": "Mean over the seeds that reach it. Dots are seeds." if has_seeds else "",
        },
        "tables": [table.data() for table in tables if table.rows],
    }


def _logarithmic_axes(groups: Sequence[Group], judge: Judge) -> list[str]:
    """Return the axes on which the fastest run would be squeezed into the edge of a chart."""
    runs = [run.history for group in groups for run in group.runs]
    axes = []
    for key in CLOCKS | SUMS:
        costs = []
        for run in runs:
            place = first_reach(run, judge)
            costs.append(column_of(run, key)[-1 if place is None else place])
        positive = [cost for cost in costs if cost > 0]
        if positive and min(positive) < LEAST_SHARE * max(positive):
            axes.append(key)
    return axes


def _caveats(groups: Sequence[Group]) -> list[str]:
    """Warn of kinds of runs that have only one seed."""
    single = [group.label for group in groups if len(group.runs) == 1]
    if len(groups) < 2 or not single:
        return []
    names = "each kind" if len(single) == len(groups) else ", ".join(single)
    return [f"One seed of {names}: another seed may give another ratio. Run more seeds of each."]


def _settings_table(comparison: Comparison) -> Table:
    """Return the settings that differ, with a value per group."""
    runs = [group.runs[0] for group in comparison.groups]
    rows = cells([key, *(run.setting(key) for run in runs)] for key in comparison.differing)
    head = ["setting", "baseline", *(f"run {place}" for place in range(1, len(runs)))]
    return Table("Settings that differ", head, rows)


def _runs_table(comparison: Comparison, target: str) -> Table:
    metric, _, clock = comparison.judge
    rows: list[list[Value]] = []
    for group in comparison.groups:
        speed = group.verdict.speed
        speed_up = number(speed.factor, times(speed.factor)) if speed else None
        if group is comparison.groups[0]:
            speed_up = ("baseline", 1.0)
        for run, result in zip(group.runs, group.results, strict=True):
            cost = NEVER_REACHED if result.to_target is None else result.to_target
            time = number(cost, cost_text(clock, result.to_target, result.unit))
            final = metric_value(metric, result.end)
            slow = metric_value(result.node_metric, result.slow)
            traffic = number(result.bytes or None, size(result.bytes))
            device_time = seconds(result.device_s or np.nan)
            prices = [slow, traffic, device_time]
            rows.append([group.label, run.seed, time, speed_up, final, *prices, run.path.name])
    head = ["run", "seed", f"time to {target}", "speed-up", f"final {words(metric)}"]
    head += ["slowest nodes", "traffic", "device time", "folder"]
    caption = (
        f"The target is {target} ({comparison.judge.target:.6g}), to be reached by the running "
        "median of five evaluations. The final value is the median of the last five. If a run "
        "has fewer than five evaluations, each counts by itself. The untrained model is ignored. "
        "Speed-up: that of all seeds together. Slowest nodes: mean of the slowest fifth, as last "
        "measured. Traffic: until the target, or the whole run. Device time: likewise."
    )
    return without_empty_columns("Runs", head, cells(rows), caption)
