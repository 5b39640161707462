"""Which method is faster, at what cost, and where ours misses what was wanted."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import over_time
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race import packed, wide_report
from flwr_hetero_studies.race.cases import BITS, ROUNDS, SETTINGS
from flwr_hetero_studies.race.cells import CELLS, MAIN, PAIR
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS
from flwr_hetero_studies.race.outcomes import (
    HEAD,
    LESS,
    LESS_SLOW,
    LESS_SLOW_THAN_BASE,
    LESS_THAN_BASE,
    TARGETS,
    Contest,
    Duel,
    brief,
    smooth,
    target_of,
)
from flwr_hetero_studies.race.tuning import TUNED, TUNED_AT, YARDSTICK, Tuning
from flwr_hetero_studies.race.watch import SMOOTHED

TUNING = "tuning: "
PACKED = f"{BITS} bits: "
ENOUGH = 1.5
"""Speed-up over the best rival that was wanted in two thirds of the tables."""
LEAST = 0.9
"""Speed-up over the best rival that was wanted in all tables."""
HEAD_DUELS = ["cell", "FedSlice: faster", "best rival: faster", "over it", "points more than it",
              "best to 2 points above", "over that"]  # fmt: skip
HEAD_COSTS = ["bytes", "device-seconds", "examples", "FedSlice's end", "FedAvg's end",
              "points more"]  # fmt: skip
ON_PAGE = [*HEAD_DUELS[:4], "bytes", "device-seconds", "points more"]
"""Columns of the table on the page. The others are among the details."""
HEAD_TUNED = ["cell", "at work", "method", "trials", "rate", "own settings", "models averaged"]


def tuned(lines: Sequence[Line]) -> str:
    settings = {key: lines[0]["case"][key] for key in SETTINGS}
    tuning = Tuning(Options(settings, fast=settings != SETTINGS), list(lines))
    rows = []
    for cell in (MAIN, *TUNED.values()):
        for at_work in TUNED_AT:
            for name, method in METHODS.items():
                choice = tuning.choice(cell, at_work, name)
                if choice is None:
                    continue
                (rate, *values), window = choice
                named = [pair for pair in zip(method.named, values, strict=True) if pair[0]]
                texts = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in named]
                count = len(tuning.scores(cell, at_work, name))
                models = "newest" if window == 1 else str(window)
                rows.append([cell, at_work, name, count, rate, "; ".join(texts), models])
    return tables.table(HEAD_TUNED, rows)


def contests(lines: Sequence[Line]) -> list[Contest]:
    """Group runs by cell and nodes at work, in the order of the page."""
    yards: dict[str, dict[int, Line]] = {}
    for cell, yardsticks in record.by(record.of(lines, name=YARDSTICK), "cell").items():
        bases = [x for x in record.of(lines, cell=cell, name=BASE) if "window" in x["case"]]
        # A cell whose FedAvg has not run yet has nothing to be compared with.
        if not bases:
            continue
        # The yardstick averages as many models as FedAvg was tuned to.
        window = bases[0]["case"]["window"]
        yards[cell] = {}
        for line in yardsticks:
            curve = line["curve"]
            chosen = {key: curve[f"{key}/{window}"] for key in ("all", "slow")}
            yards[cell][line["seed"]] = line | {"curve": curve | chosen}
    found = []
    for (cell, at_work), own in record.by(lines, "cell", "at_work").items():
        runs = {name: x for name, x in record.by(own, "name").items() if name != YARDSTICK}
        if runs and cell in yards:
            found.append(Contest(cell, at_work, runs, yards[cell]))
    order = list(CELLS)
    return sorted(found, key=lambda contest: (order.index(contest.cell), contest.at_work))


def section(cell: str, group: Sequence[Contest]) -> str:
    first = group[0]
    seeds = ", ".join(map(str, sorted(first.yard)))
    ends = tables.extent([100 * target_of(yard) for yard in first.yard.values()], "{:.1f}")
    times = [first.reach(yard, TARGETS[0])["virtual_s"] for yard in first.yard.values()]
    text = (
        f"### {cell}\n\nSeeds {seeds}. FedAvg with three nodes a round ends at {ends} % and is "
        f"within a point after {tables.extent(times, '{:.0f}')} s.\n\n"
    )
    for contest in group:
        table = tables.table(HEAD, map(contest.row, contest.ranked()))
        text += f"{contest.at_work} nodes at work:\n\n{table}\n"
    return text


def duels(found: Sequence[Contest]) -> dict[str, str]:
    """Hold ours against the best rival in each table, and count where it has what was wanted."""
    bases = {contest.where: duel for contest, duel in with_base(found)}
    rows = []
    first: dict[str, Duel] = {}
    late_ratios = []
    for contest in found:
        duel = contest.duel()
        late = contest.duel(TARGETS[1])
        if duel is None or late is None:
            continue
        first[contest.where] = duel
        rival = f"{duel.rival}: {brief(contest.row(duel.rival))[1]}"
        cells = [contest.where, contest.row(OURS)[1], rival, duel.speedup, " / ".join(duel.points)]
        late_ratios.append(late.ratio)
        if contest.where in bases:
            costs = costs_of(contest, bases[contest.where])
            rows.append([*cells, late.rival, late.speedup, *costs])
    ahead = sum(duel.ratio >= ENOUGH for duel in first.values())
    behind = [where for where, duel in first.items() if duel.ratio < LEAST]
    lost = [where for where, duel in first.items() if not duel.holds]
    summary = (
        f"Of {len(first)} tables ours, at FedAvg's rate, is at least {ENOUGH} times as fast as the "
        f"best rival in {ahead}, and less than {LEAST} times in {listed(behind)}. It loses more "
        f"than {100 * LESS:g} points, or {100 * LESS_SLOW:g} on the slowest tier's data, in "
        f"{listed(lost)}."
    )
    head = [*HEAD_DUELS, *HEAD_COSTS]
    late_behind = sum(ratio < 1 for ratio in late_ratios)
    below = [f"{w} ({' / '.join(first[w].points)} of the best rival's end)" for w in lost]
    below += ends_below(found)
    return {
        "duels": tables.only(ON_PAGE, head, rows),
        "duels_and_costs": tables.table(head, rows),
        "late_behind": f"{late_behind} of {len(late_ratios)}",
        "summary": summary,
        "ahead": f"{ahead} of {len(first)}",
        "ends_missed": f"**missed** {'; '.join(below)}." if below else "it is.",
    }


def with_base(found: Sequence[Contest]) -> list[tuple[Contest, Duel]]:
    """Return the contests of ours and FedAvg, with ours against FedAvg after as much work."""
    both = [contest for contest in found if contest.runs.keys() >= {OURS, BASE}]
    return [(contest, contest.against(contest.runs[BASE], contest.runs[OURS])) for contest in both]


def ends_below(found: Sequence[Contest]) -> list[str]:
    """Write where ours ends further below FedAvg, after as much work, than is wanted."""
    texts = []
    for contest, duel in with_base(found):
        if duel.more < -LESS_THAN_BASE or duel.more_slow < -LESS_SLOW_THAN_BASE:
            texts.append(f"{contest.where} ({' / '.join(duel.points)} of FedAvg's)")
    return texts


def costs_of(contest: Contest, duel: Duel) -> list[str]:
    """Return what ours takes besides time, and where it and FedAvg end."""
    ours = brief(contest.row(OURS))
    ends = [f"{row[-2]} ({row[-1]})" for row in (ours, brief(contest.row(BASE)))]
    return [*ours[4:7], *ends, " / ".join(duel.points)]


def listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {'; '.join(names)}" if names else "0"


def picture(found: Sequence[Contest], path: Path) -> None:
    panels: dict[str, dict[str, Any]] = {}
    levels = {}
    for contest in found:
        if contest.cell != found[0].cell:
            continue
        yards = list(contest.yard.values())
        drawn: dict[str, Sequence[Line]] = {"FedAvg, 3 a round": yards}
        rivals = [name for name in contest.ranked() if name not in (OURS, BASE)]
        for name in (OURS, *rivals[:2]):
            if name in contest.runs:
                drawn[name] = contest.runs[name]
        title = f"{contest.at_work} of 20 nodes at work"
        # Runs of --fast may be too short to draw.
        drawable = {n: x for n, x in drawn.items() if all(len(smooth(line)) for line in x)}
        panels[title] = {name: band(lines) for name, lines in drawable.items()}
        levels[title] = 100 * (mean(map(target_of, yards)) + TARGETS[0])
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, path, *labels, levels=levels, xscale="log", ylim=(60, None))


def band(lines: Sequence[Line]) -> list[Any]:
    """Return times, and the mean and the extremes over seeds of the smoothed accuracy in %."""
    clocks = [line["curve"]["virtual_s"][SMOOTHED - 1 :] for line in lines]
    values = [100 * smooth(line) for line in lines]
    folded = [over_time(clocks, values, fold=fold) for fold in (np.mean, np.min, np.max)]
    return [folded[0][0], *(column for _, column in folded)]


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    main = [line for line in lines if not wide_report.is_wide(line)]
    groups: dict[str, list[Line]] = {TUNING: [], PACKED: [], "": []}
    for line in main:
        experiment = line["case"]["experiment"]
        kind = next(kind for kind in groups if experiment.startswith(kind))
        groups[kind].append(line)
    compared = contests(groups[""])
    # Two methods alone are no race.
    found = [contest for contest in compared if CELLS[contest.cell].methods != PAIR]
    parts: dict[str, Any] = {"rounds": ROUNDS}
    if not found:
        return parts
    parts |= {"num_tuning": len(groups[TUNING]), "num_runs": len(main) - len(groups[TUNING])}
    parts["core_s"] = round(sum(record.metric(main, "took_s")))
    parts["software"] = record.software(main)
    picture(found, folder / "race.png")
    cells = dict.fromkeys(contest.cell for contest in found)
    sections = [section(cell, [c for c in found if c.cell == cell]) for cell in cells]
    parts |= duels(found)
    parts |= {"cells": "".join(sections), "tuned": tuned(main)}
    for contest in found:
        if (contest.cell, contest.at_work) == (MAIN, 5):
            rows = [brief(contest.row(name)) for name in contest.ranked()]
            parts["methods"] = tables.only([*HEAD[:2], HEAD[4], *HEAD[7:]], HEAD, rows)
    parts |= packed.section(compared, groups[PACKED])
    parts |= wide_report.section(lines)
    return parts
