"""``compare.html``: the page of a comparison."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero.report import page
from flwr_hetero.report.compare import Comparison, Group
from flwr_hetero.report.compare.verdict import Judge, cost_text, first_reach, times
from flwr_hetero.report.curves import SUMS, Line, column_of, curve_data
from flwr_hetero.report.history import CLOCKS
from flwr_hetero.report.style import figure, size, words
from flwr_hetero.report.tables import Cell, Table, number, seconds, tables_of, text

# An axis is logarithmic where the first to the target had less than this part of the last one's.
LEAST_SHARE = 0.2


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page, in one step; return its absolute path."""
    return page.write_page(comparison_data(comparison), Path(path).expanduser().absolute())


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return all that the page of a comparison shows, for JSON."""
    judge, groups = comparison.judge, comparison.groups
    lines = []
    for group in groups:
        label = f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label
        lines.append(Line(label, group.colour, [run.history for run in group.runs]))
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    named = [(group.label, run.seed, run.history) for group in groups for run in group.runs]
    tables = [_settings(comparison), _runs(comparison, goal), *tables_of(named)]
    base, *others = (group.label for group in groups)
    kinds = others if len(others) < 2 else [f"{len(others)} kinds of runs"]
    costs = [[r.to_target for r in g.results if r.to_target is not None] for g in groups]
    return {
        "kind": "comparison",
        "title": " against ".join([*kinds, base]),
        "where": ", ".join(str(run.path) for group in groups for run in group.runs),
        "sentences": list(comparison.sentences),
        "notes": _caveats(groups),
        "curves": curve_data(lines, judge.metric, judge.clock, judge.target, _wide(groups, judge)),
        "costs": {
            "title": f"{'Rounds' if judge.clock == 'round' else 'Time'} to {goal}",
            "label": CLOCKS[judge.clock] + ("" if judge.clock == "round" else " (s)"),
            "values": costs,
        },
        "tables": [table.data() for table in tables if table.rows],
    }


def _wide(groups: Sequence[Group], judge: Judge) -> list[str]:
    """Return the axes on which the quickest run would be at the edge of a chart."""
    runs, found = [run.history for group in groups for run in group.runs], []
    places = [first_reach(run, judge) for run in runs]
    for key in CLOCKS | SUMS:
        columns = [column_of(run, key) for run in runs]
        ends = [own[-1 if at is None else at] for own, at in zip(columns, places, strict=True)]
        known = [end for end in ends if end > 0]
        if known and min(known) < LEAST_SHARE * max(known):
            found.append(key)
    return found


def _caveats(groups: Sequence[Group]) -> list[str]:
    """Say which kinds of runs have one seed only."""
    alone = [group.label for group in groups if len(group.runs) == 1]
    if len(groups) < 2 or not alone:
        return []
    names = "each kind" if len(alone) == len(groups) else ", ".join(alone)
    return [f"One seed of {names}: another seed may give another ratio. Run more seeds of each."]


def _settings(comparison: Comparison) -> Table:
    """Return the settings that differ, with a value per group."""
    firsts = [group.runs[0] for group in comparison.groups]
    keys = comparison.differing
    rows = [[text(key), *(text(run.setting(key)) for run in firsts)] for key in keys]
    head = ["setting", "baseline", *(f"run {n}" for n in range(1, len(firsts)))]
    return Table("Settings that differ", head, rows)


def _runs(comparison: Comparison, goal: str) -> Table:
    head = ("run", "seed", f"time to {goal}", "speed-up", "end", "traffic", "device time", "folder")
    caption = (
        f"Target: {goal} ({comparison.judge.target:.6g}), by a running median of five evaluations. "
        "End: median of the last five. Of fewer than five each counts; the untrained model never "
        "does. Speed-up: of all seeds together."
    )
    return Table("Runs", head, [*_rows(comparison)], caption)


def _rows(comparison: Comparison) -> Iterator[list[Cell]]:
    metric, _, clock = comparison.judge
    for group in comparison.groups:
        factor = group.verdict.speed.factor if group.verdict.speed else np.nan
        is_base = group is comparison.groups[0]
        speed = ("baseline", 1.0) if is_base else number(factor, times(factor))
        for run, result in zip(group.runs, group.results, strict=True):
            # A run that never reached the target is sorted last.
            cost = 1e300 if result.to_target is None else result.to_target
            spent = number(cost, cost_text(clock, result.to_target, result.unit))
            end = number(result.end, figure(metric, result.end))
            traffic = number(result.bytes or np.nan, size(result.bytes))
            known = [text(group.label), number(run.seed), spent, speed, end, traffic]
            yield [*known, seconds(result.device_s or np.nan), text(run.path.name)]
