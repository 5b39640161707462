"""``compare.html``: the page of a comparison."""

from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero.report import page
from flwr_hetero.report.compare import Comparison
from flwr_hetero.report.compare.verdict import cost_text, times
from flwr_hetero.report.curves import Line, curve_data
from flwr_hetero.report.history import CLOCKS
from flwr_hetero.report.style import RUN_DASHES, duration, figure, size, words
from flwr_hetero.report.tables import Named, Table, number, tables_of, text


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page, in one step; return its absolute path."""
    out = Path(path).expanduser().absolute()
    return page.write_page(comparison_data(comparison), out)


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return all that the page of a comparison shows, for JSON."""
    judge, groups = comparison.judge, comparison.groups
    lines = [
        Line(
            f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label,
            group.colour,
            RUN_DASHES[place // 7 % len(RUN_DASHES)],
            [run.history for run in group.runs],
        )
        for place, group in enumerate(groups)
    ]
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    named = [Named(group.label, run.seed, run.history) for group in groups for run in group.runs]
    tables = [_settings(comparison), _runs(comparison, goal), *tables_of(named)]
    base, *others = (group.label for group in groups)
    kinds = others if len(others) < 2 else [f"{len(others)} kinds of runs"]
    costs = [[r.to_target for r in g.results if r.to_target is not None] for g in groups]
    return {
        "kind": "comparison",
        "title": " against ".join([*kinds, base]),
        "where": ", ".join(str(run.path) for group in groups for run in group.runs),
        "sentences": list(comparison.sentences),
        "curves": curve_data(lines, judge.metric, judge.clock, judge.target),
        "costs": {
            "title": f"{'Rounds' if judge.clock == 'round' else 'Time'} to {goal}",
            "label": CLOCKS[judge.clock] + ("" if judge.clock == "round" else " (s)"),
            "values": costs,
        },
        "tables": [table.data() for table in tables if table.rows],
    }


def _settings(comparison: Comparison) -> Table:
    """Return the settings that differ, with a value per group."""
    firsts = [group.runs[0] for group in comparison.groups]
    rows = [
        [text(key), *(text(run.setting(key)) for run in firsts)] for key in comparison.differing
    ]
    head = ["setting", "baseline", *(f"run {n}" for n in range(1, len(firsts)))]
    return Table("Settings that differ", head, rows)


def _runs(comparison: Comparison, goal: str) -> Table:
    judge, base = comparison.judge, comparison.groups[0]
    rows = []
    for group in comparison.groups:
        factor = group.speed.factor if group.speed else np.nan
        for run, result in zip(group.runs, group.results, strict=True):
            unit = run.history.unit
            cost = 1e300 if result.to_target is None else result.to_target  # never: sorted last
            rows.append(
                [
                    text(group.label),
                    number(run.seed),
                    number(cost, cost_text(judge.clock, result.to_target, unit)),
                    ("baseline", 1.0) if group is base else number(factor, times(factor)),
                    number(result.end, figure(judge.metric, result.end)),
                    number(result.rounds),
                    number(result.total, cost_text(judge.clock, result.total, unit)),
                    number(result.bytes or np.nan, size(result.bytes)),
                    number(result.device_s or np.nan, duration(result.device_s)),
                    text(run.path.name),
                ]
            )
    head = (f"time to {goal}", "speed-up", "end", "rounds", "in all", "traffic", "device time")
    caption = (
        f"Target: {goal} ({judge.target:.6g}), by a running median of five evaluations. End: "
        "median of the last five. Speed-up: of all seeds together."
    )
    return Table("Runs", ("run", "seed", *head, "folder"), rows, caption)
