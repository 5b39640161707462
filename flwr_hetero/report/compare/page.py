"""``compare.html``: the page of a comparison."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero.report import page
from flwr_hetero.report.compare import Comparison
from flwr_hetero.report.compare.sentences import cost_text, times
from flwr_hetero.report.curves import Line, curve_data
from flwr_hetero.report.style import RUN_COLOURS, figure, size, words
from flwr_hetero.report.tables import Table, Value, cells, metric_value, number, seconds, tables_of

ONE_SEED = "With one seed, the ratio may be another one by chance: run more seeds of each kind."
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
    for group, colour in zip(groups, cycle(RUN_COLOURS), strict=False):
        label = f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label
        lines.append(Line(label, colour, [run.history for run in group.runs]))
    target = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    named = [(group.label, run.seed, run.history) for group in groups for run in group.runs]
    tables = [_settings_table(comparison), _runs_table(comparison, target), *tables_of(named)]
    base, *others = [group.label for group in groups]
    title = [f"{len(others)} kinds of runs"] if len(others) > 1 else others
    has_single = any(len(group.runs) == 1 for group in groups)
    is_by_round = judge.clock == "round"
    costs = [[r.to_target for r in group.results if r.to_target is not None] for group in groups]
    return {
        "kind": "comparison",
        "title": " against ".join([*title, base]),
        "where": ", ".join(str(run.path) for group in groups for run in group.runs),
        "sentences": list(comparison.sentences),
        "notes": [ONE_SEED] if has_single and len(groups) > 1 else [],
        "curves": curve_data(lines, judge.metric, judge.clock, judge.target),
        "costs": {
            "title": f"{'Rounds' if is_by_round else 'Time'} to {target}",
            "axis": judge.clock,
            "values": costs,
        },
        "tables": [table.data() for table in tables if table.rows],
    }


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
            traffic = number(result.bytes or None, size(result.bytes))
            device_time = seconds(result.device_s or np.nan)
            slow = metric_value(result.node_metric, result.slow)
            row = [group.label, run.seed, time, speed_up, final, slow, traffic, device_time]
            rows.append([*row, run.path.name])
    head = ["run", "seed", f"time to {target}", "speed-up", f"final {words(metric)}"]
    head += ["slowest nodes", "traffic", "device time", "folder"]
    caption = (
        f"The target is {target} ({comparison.judge.target:.6g}), to be reached by the running "
        "median of five evaluations. The final value is the median of the last five. If a run "
        "has fewer than five evaluations, each counts by itself. The untrained model is ignored. "
        "The speed-up is that of all seeds together. Slowest nodes: the mean of the slowest fifth, "
        "as last measured. Traffic and device time: until the target, or of the whole run."
    )
    return Table("Runs", head, cells(rows), caption)
