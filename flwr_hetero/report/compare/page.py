"""``compare.html``: the page of a comparison."""

from itertools import cycle
from pathlib import Path
from typing import Any

from flwr_hetero.report import page
from flwr_hetero.report.compare import Comparison
from flwr_hetero.report.compare.sentences import cost_text, times
from flwr_hetero.report.curves import Line, curve_data
from flwr_hetero.report.style import RUN_COLOURS, duration, figure, size, words
from flwr_hetero.report.tables import Table, make_table

ONE_SEED = "With one seed, the ratio may be another one by chance: run more seeds of each kind."


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page, in one step; return its absolute path."""
    return page.write_page(comparison_data(comparison), Path(path).expanduser().absolute())


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return everything that the page of a comparison shows."""
    judge = comparison.judge
    groups = comparison.groups
    lines = []
    for group, colour in zip(groups, cycle(RUN_COLOURS), strict=False):
        label = f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label
        lines.append(Line(label, colour, [run.history for run in group.runs]))
    target = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    tables = [_settings_table(comparison), _runs_table(comparison, target)]
    base, *others = [group.label for group in groups]
    title = [f"{len(others)} kinds of runs"] if len(others) > 1 else others
    has_single = any(len(group.runs) == 1 for group in groups)
    costs = [[r.to_target for r in group.results if r.to_target is not None] for group in groups]
    return {
        "kind": "comparison",
        "title": " against ".join([*title, base]),
        "where": ", ".join(str(run.path) for group in groups for run in group.runs),
        "sentences": list(comparison.sentences),
        "notes": [ONE_SEED] if has_single and len(groups) > 1 else [],
        "curves": curve_data(lines, judge.metric, judge.clock, judge.target),
        "costs": {
            "title": f"{'Rounds' if judge.clock == 'round' else 'Time'} to {target}",
            "axis": judge.clock,
            "values": costs,
        },
        "tables": [table for table in tables if table.rows],
    }


def _settings_table(comparison: Comparison) -> Table:
    """Return the settings that differ, with a value per group."""
    runs = [group.runs[0] for group in comparison.groups]
    rows = [[key, *(run.setting(key) for run in runs)] for key in comparison.differing]
    head = ["setting", "baseline", *(f"run {place}" for place in range(1, len(runs)))]
    return make_table("Settings that differ", head, rows)


def _runs_table(comparison: Comparison, target: str) -> Table:
    metric, _, clock = comparison.judge
    rows = []
    for place, group in enumerate(comparison.groups):
        speed = group.verdict.speed
        speed_up = times(speed.factor) if speed else ""
        for run, result in zip(group.runs, group.results, strict=True):
            row = [
                group.label,
                run.seed,
                cost_text(clock, result.to_target, result.unit),
                speed_up if place > 0 else "baseline",
                figure(metric, result.end),
                figure(result.node_metric, result.slow),
                size(result.bytes) if result.bytes else None,
                duration(result.device_s) if result.device_s else None,
                run.path.name,
            ]
            rows.append(row)
    head = ["run", "seed", f"time to {target}", "speed-up", f"final {words(metric)}"]
    head += ["slowest nodes", "traffic", "device time", "folder"]
    caption = (
        f"The target is {target} ({comparison.judge.target:.6g}), to be reached by the running "
        "median of five evaluations. The final value is the median of the last five. If a run "
        "has fewer than five evaluations, each counts by itself. The untrained model is ignored. "
        "The speed-up is that of all seeds together. Slowest nodes: the mean of the slowest fifth, "
        "as last measured. Traffic and device time: until the target, or of the whole run."
    )
    return make_table("Runs", head, rows, caption)
