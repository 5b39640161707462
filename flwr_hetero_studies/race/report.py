"""Who is sooner, at what cost, and what the decision table says: from the lines of the race."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import over_time
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race import limit, packed, wide_report
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
)
from flwr_hetero_studies.race.tuning import TUNED, TUNED_AT, YARDSTICK, Tuning
from flwr_hetero_studies.race.watch import SMOOTHED

TUNING, PARTS, PACKED = "tuning: ", "parts: ", f"{BITS} bits: "
ENOUGH, LEAST = 1.5, 0.9
"""Ratio wanted of two thirds of the cells, and of all."""
HEAD_DUELS = ["cell", "FedSlice: sooner", "best rival: sooner", "over it",
              "points", "best to 2 points above", "over it"]  # fmt: skip
HEAD_COSTS = ["cell", "bytes", "device-seconds", "examples", "FedSlice's end", "FedAvg's end",
              "points more"]  # fmt: skip
HEAD_TUNED = ["cell", "at work", "method", "trials", "rate", "own settings", "models averaged"]


def is_of(line: Line, kind: str) -> bool:
    return bool(line["case"]["experiment"].startswith(kind))


def tuned(lines: Sequence[Line]) -> str:
    settings = {key: lines[0]["case"][key] for key in SETTINGS}
    tuning = Tuning(Options(settings, fast=settings != SETTINGS), list(lines))
    rows = []
    for cell in dict.fromkeys([MAIN, *TUNED.values()]):
        for at_work in TUNED_AT:
            for name, method in METHODS.items():
                found = tuning.choice(cell, at_work, name)
                if found is None:
                    continue
                (rate, *values), window = found
                both = zip(method.named, values, strict=True)
                own = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in both if n]
                count = len(tuning.scores(cell, at_work, name))
                models = "newest" if window == 1 else str(window)
                rows.append([cell, at_work, name, count, rate, "; ".join(own), models])
    return tables.table(HEAD_TUNED, rows)


def contests(lines: Sequence[Line]) -> list[Contest]:
    found, yards = [], {}
    for cell, own in record.by(record.of(lines, name=YARDSTICK), "cell").items():
        base = next(x for x in record.of(lines, cell=cell, name=BASE) if "window" in x["case"])
        # the yardstick is read by what FedAvg was given
        window = base["case"]["window"]
        yards[cell] = {
            x["seed"]: x | {"curve": c | {k: c[f"{k}/{window}"] for k in ("all", "slow")}}
            for x in own for c in [x["curve"]]
        }  # fmt: skip
    for (cell, at_work), own in record.by(lines, "cell", "at_work").items():
        runs = {name: x for name, x in record.by(own, "name").items() if name != YARDSTICK}
        if runs:
            found.append(Contest(cell, at_work, runs, yards[cell]))
    # in the order of the page, whatever order they were run in
    order = list(CELLS)
    return sorted(found, key=lambda each: (order.index(each.cell), each.at_work))


def section(cell: str, group: Sequence[Contest]) -> str:
    yard = group[0].yard
    ends = [100 * line["metrics"]["limits"]["end"] for line in yard.values()]
    times = [group[0].reach(line, TARGETS[0])["virtual_s"] for line in yard.values()]
    text = (
        f"### {cell}\n\nSeeds {', '.join(map(str, sorted(yard)))}. FedAvg with three nodes a round "
        f"ends at {tables.extent(ends, '{:.1f}')} % and is within a point after "
        f"{tables.extent(times, '{:.0f}')} s.\n\n"
    )
    for each in group:
        rows = map(each.row, each.ranked())
        text += f"{each.at_work} nodes at work:\n\n{tables.table(HEAD, rows)}\n"
    return text


def duels(found: Sequence[Contest]) -> dict[str, str]:
    """Write ours against the best rival in each table, and how many hold what is wanted."""
    rows, first = [], dict[str, Duel]()
    for each in found:
        duel, late = (each.duel(shift) for shift in TARGETS)
        if duel is None or late is None:
            continue
        first[each.where] = duel
        rival, over, *points = duel.cells
        theirs = f"{rival}: {brief(each.row(rival))[1]}"
        both = [each.row(OURS)[1], theirs, over, " / ".join(points)]
        rows.append([each.where, *both, *late.cells[:2]])
    ahead = sum(duel.ratio >= ENOUGH for duel in first.values())
    behind = [where for where, duel in first.items() if duel.ratio < LEAST]
    lost = [where for where, duel in first.items() if not duel.holds]
    summary = (
        f"Of {len(first)} tables ours, at FedAvg's rate, is at least {ENOUGH} times as soon as the "
        f"best rival in {ahead}, and less than {LEAST} times in {listed(behind)}. It loses more "
        f"than {100 * LESS:g} points, or {100 * LESS_SLOW:g} on the slowest tier's data, in "
        f"{listed(lost)}."
    )
    table = tables.table(HEAD_DUELS, rows)
    below = [
        f"{where} ({' / '.join(duel.cells[2:])} of the best rival's end)"
        for where, duel in first.items()
        if not duel.holds
    ]
    below += ends_below(found)
    missed = f"**missed** {'; '.join(below)}." if below else "it is."
    parts = {"duels": table, "summary": summary, "ahead": f"{ahead} of {len(first)}"}
    return parts | {"ends_missed": missed}


def ends_below(found: Sequence[Contest]) -> list[str]:
    """Write where ours ends further below FedAvg, after as much work, than is wanted."""
    texts = []
    for each in (each for each in found if BASE in each.runs and OURS in each.runs):
        duel = each.against(each.runs[BASE], each.runs[OURS])
        if duel.more < -LESS_THAN_BASE or duel.more_slow < -LESS_SLOW_THAN_BASE:
            texts.append(f"{each.where} ({' / '.join(duel.cells[2:])} of FedAvg's)")
    return texts


def costs(found: Sequence[Contest]) -> str:
    """Write what ours takes besides time, and where it ends, beside FedAvg."""
    rows = []
    for each in (each for each in found if each.runs.keys() >= {OURS, BASE}):
        ours, base = (brief(each.row(name)) for name in (OURS, BASE))
        ends = [f"{row[-2]} ({row[-1]})" for row in (ours, base)]
        points = each.against(each.runs[BASE], each.runs[OURS]).cells[2:]
        rows.append([each.where, *ours[4:7], *ends, " / ".join(points)])
    return tables.table(HEAD_COSTS, rows)


def listed(names: Sequence[str]) -> str:
    return f"{len(names)}{': ' if names else ''}{'; '.join(names)}"


def picture(found: Sequence[Contest], path: Path) -> None:
    panels: dict[str, dict[str, Any]] = {}
    levels = {}
    for each in (each for each in found if each.cell == found[0].cell):
        drawn: dict[str, Sequence[Line]] = {"FedAvg, 3 a round": [*each.yard.values()]}
        rivals = [name for name in each.ranked() if name not in (OURS, BASE)]
        drawn |= {name: each.runs[name] for name in (OURS, *rivals[:2]) if name in each.runs}
        title = f"{each.at_work} of 20 nodes at work"
        panels[title] = {name: band(lines) for name, lines in drawn.items()}
        ends = [line["metrics"]["limits"]["end"] for line in each.yard.values()]
        levels[title] = 100 * (mean(ends) + TARGETS[0])
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, path, *labels, levels=levels, xscale="log", ylim=(60, None))


def band(lines: Sequence[Line]) -> list[Any]:
    """Return times, and of the seeds the mean and the extremes of the smoothed accuracy in %."""
    clocks = [line["curve"]["virtual_s"][SMOOTHED - 1 :] for line in lines]
    every = [100 * smooth(line) for line in lines]
    found = [over_time(clocks, every, fold=fold) for fold in (np.mean, np.min, np.max)]
    return [found[0][0], *(values for _, values in found)]


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    every = lines
    lines = [x for x in every if not wide_report.is_wide(x) and not limit.is_limit(x)]
    race = [line for line in lines if not is_of(line, TUNING)]
    compared = contests([x for x in race if not is_of(x, PARTS) and not is_of(x, PACKED)])
    # two methods alone are no race
    found = [each for each in compared if CELLS[each.cell].methods != PAIR]
    parts: dict[str, Any] = {"rounds": ROUNDS}
    if not found:
        return parts
    parts |= {"num_tuning": len(lines) - len(race), "num_runs": len(race)}
    took_s = round(sum(record.metric(lines, "took_s")))
    parts |= {"core_s": took_s, "software": record.software(lines)}
    picture(found, folder / "race.png")
    cells = dict.fromkeys(each.cell for each in found)
    sections = [section(cell, [each for each in found if each.cell == cell]) for cell in cells]
    parts |= duels(found) | {"costs": costs(found)}
    parts |= {"cells": "".join(sections), "tuned": tuned(lines)}
    for main in (each for each in found if (each.cell, each.at_work) == (MAIN, 5)):
        rows = [brief(main.row(name)) for name in main.ranked()]
        parts["methods"] = tables.only([HEAD[0], HEAD[1], *HEAD[4:]], HEAD, rows)
    mains = [each for each in found if (each.cell, each.at_work) == (MAIN, 20)]
    parts |= limit.section(every, mains[0] if mains else None)
    parts |= packed.section(compared, [line for line in race if is_of(line, PACKED)])
    parts |= wide_report.section(every)
    if shared := [line for line in race if is_of(line, PARTS)]:
        contest = found[0]._replace(runs=record.by(shared, "name"))
        base, *others = contest.runs
        # the base takes the place of the best rival
        duel_of = {n: contest.against(contest.runs[base], contest.runs[n]) for n in others}
        rows = [[n, tables.extent(duel.ratios), *duel.cells[2:]] for n, duel in duel_of.items()]
        head = ["method", f"sooner than {base}, less a point", "points more", "slowest tier's"]
        parts["added"] = tables.table(head, rows)
    return parts
