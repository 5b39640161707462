"""Which method is faster, at what cost, and where ours misses what was wanted."""

from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite, log, nan
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.curves import Vector, at, over_time
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race.cases import BITS, ROUNDS
from flwr_hetero_studies.race.cells import CELLS, MAIN, PACKED, PAIR, WIDE
from flwr_hetero_studies.race.methods import BASE, OURS
from flwr_hetero_studies.race.tuning import YARDSTICK
from flwr_hetero_studies.race.watch import SMOOTHED

TARGETS = (-0.01, 0.02)
"""Accuracies that count, relative to FedAvg's end."""
COSTS = ("virtual_s", "bytes", "device_s", "examples")
HEAD = ["method", "faster: less a point", "2 points above", "bytes", "device-seconds",
        "examples", "end: all", "end: slowest tier"]  # fmt: skip
TUNING = "tuning: "
IN_BITS = f"{BITS} bits: "
ENOUGH = 1.5
"""Speed-up over the best rival that was wanted in two thirds of the tables."""
LEAST = 0.9
"""Speed-up over the best rival that was wanted in all tables."""
LESS = 0.005
LESS_SLOW = 0.01
"""Accuracy that ours may end below the best rival, on all data and on the slowest tier's."""
LESS_THAN_BASE = 0.003
LESS_SLOW_THAN_BASE = 0.005
"""Accuracy that ours may end below FedAvg, on all data and on the slowest tier's."""
ENOUGH_WIDE = 1.3
"""Speed-up over the best rival that was wanted in three quarters of the cells of other fleets."""
LEAST_WIDE = 1.0
HEAD_DUELS = ["cell", "FedSlice: faster", "best rival: faster", "over it", "bytes",
              "device-seconds", "points more"]  # fmt: skip
HEAD_PACKED = ["cell", "method", "times faster", "than FedAvg: whole", f"{BITS} bits",
               "bytes: whole", f"{BITS} bits", "end: whole", f"{BITS} bits"]  # fmt: skip
HEAD_WIDE = ["cell", "seeds", "s", "best rival: its s", "times faster", "to the late target",
             "points more than FedAvg, slowest tier's"]  # fmt: skip


def smooth(line: Line) -> Vector:
    return curves.smooth(line["curve"]["all"], SMOOTHED, whole=True)


def end(line: Line, name: str = "all") -> float:
    return curves.last(line, name, SMOOTHED)


def last_s(line: Line) -> float:
    return float(line["curve"]["virtual_s"][-1])


class Contest(NamedTuple):
    """One cell with so many nodes at work, and FedAvg with three nodes a round by seed."""

    cell: str
    at_work: int
    runs: Mapping[str, Sequence[Line]]
    yard: Mapping[int, Line]
    late: bool = False
    """Whether the target is the end of FedAvg's whole run."""

    @property
    def where(self) -> str:
        return f"{self.cell}, {self.at_work} at work"

    def target(self, yard: Line) -> float:
        return end(yard) if self.late else float(yard["metrics"]["limits"]["end"])

    def reach(self, line: Line, shift: float = TARGETS[0]) -> dict[str, float]:
        """Return what a target took, by the first look at which the mean is there, or infinity."""
        target = self.target(self.yard[line["seed"]]) + shift
        place = curves.reached(smooth(line), target)
        costs = {}
        for name in COSTS:
            column = line["curve"][name][SMOOTHED - 1 :]
            # The place is NaN if the target is never reached, and then no comparison holds.
            costs[name] = at(column, place) if place >= 0 else inf
        return costs

    def time_s(self, line: Line, shift: float, latest: Line | None = None) -> float:
        """Return the seconds to a target, at most those of the yardstick or of another run."""
        limit_s = last_s(latest or self.yard[line["seed"]])
        return min(self.reach(line, shift)["virtual_s"], limit_s)

    def rank(self, name: str, shift: float = TARGETS[0]) -> float:
        return exp(mean(log(self.time_s(line, shift)) for line in self.runs[name]))

    def ranked(self) -> list[str]:
        return sorted(self.runs, key=self.rank)

    def faster(self, name: str, shift: float = TARGETS[0], *, extremes: bool = False) -> str:
        """Write how many times as fast as the yardstick a method is."""
        ratios = []
        is_bound = False
        for line in self.runs[name]:
            yard = self.yard[line["seed"]]
            own_s = self.reach(line, shift)["virtual_s"]
            if isfinite(own_s):
                base_s = self.reach(yard, shift)["virtual_s"]
                # Where FedAvg does not get there, its time is at least its whole run.
                is_bound = is_bound or not isfinite(base_s)
                ratios.append(min(base_s, last_s(yard)) / own_s)
        if not ratios:
            return "not reached"
        text = "> " if is_bound else ""
        text += tables.extent(ratios, "{:.1f}x") if extremes else f"{mean(ratios):.1f}x"
        count = len(self.runs[name])
        return text + (f"; {count - len(ratios)} of {count} not" if len(ratios) < count else "")

    def share(self, name: str, cost: str) -> float:
        """Return what a method took to the target, as a multiple of the yardstick's; or NaN."""
        ratios = []
        for line in self.runs[name]:
            own = self.reach(line)[cost]
            base = self.reach(self.yard[line["seed"]])[cost]
            if isfinite(own) and isfinite(base):
                ratios.append(own / base)
        return mean(ratios) if ratios else nan

    def row(self, name: str) -> list[str]:
        shares = [self.share(name, cost) for cost in COSTS[1:]]
        ends = [mean(end(line, key) for line in self.runs[name]) for key in ("all", "slow")]
        return [
            name,
            *(self.faster(name, shift) for shift in TARGETS),
            *(f"{share:.2f}" if isfinite(share) else "" for share in shares),
            *(f"{100 * accuracy:.1f}" for accuracy in ends),
        ]

    def against(
        self, base: Sequence[Line], own: Sequence[Line], shift: float = TARGETS[0]
    ) -> "Duel":
        pairs = record.pairs(own, base)
        # Ours counts as there when FedAvg ends, a rival when its own run ends.
        ratios = [self.time_s(b, shift, latest=b) / self.time_s(a, shift) for a, b in pairs]
        more = mean(end(a) - end(b) for a, b in pairs)
        more_slow = mean(end(a, "slow") - end(b, "slow") for a, b in pairs)
        return Duel(base[0]["case"]["name"], ratios, more, more_slow)

    def duel(self, shift: float = TARGETS[0]) -> "Duel | None":
        """Hold ours against the best rival."""
        rivals = [name for name in self.runs if name != OURS]
        if OURS not in self.runs or not rivals:
            return None
        best = min(rivals, key=lambda name: self.rank(name, shift))
        return self.against(self.runs[best], self.runs[OURS], shift)


class Duel(NamedTuple):
    """Ours against a rival, seed by seed."""

    rival: str
    ratios: list[float]
    more: float
    more_slow: float

    @property
    def ratio(self) -> float:
        return exp(mean(map(log, self.ratios)))

    def is_within(self, less: float, less_slow: float) -> bool:
        """Return whether ours ends at most so far below, on all and on the slowest tier's data."""
        return self.more >= -less and self.more_slow >= -less_slow

    @property
    def speedup(self) -> str:
        text = f"{self.ratio:.2f}"
        if len(self.ratios) > 1:
            text += f" ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        return text

    @property
    def points(self) -> list[str]:
        """Write accuracy at the end over the rival's, on all data and on the slowest tier's."""
        return [f"{100 * value:+.1f}" for value in (self.more, self.more_slow)]


class Wanted(NamedTuple):
    """What FedSlice in bits was to reach."""

    faster: float = 0.0
    """Times as fast as with whole models."""
    bytes: float = inf
    """As a multiple of FedAvg's."""
    less: float = 0.3
    """Points that may be lost."""


WANTED = {
    ("10 Mbit/s", 5): Wanted(1.5, 0.6),
    ("10 Mbit/s", 20): Wanted(2.0, 2.0),
    ("log-normal", 5): Wanted(1.6),
    (MAIN, 5): Wanted(0.97),
    ("classes by speed", 5): Wanted(0.97),
    ("texts", 5): Wanted(less=0.5),
    ("CNN", 5): Wanted(less=0.5),
}


def contests(lines: Sequence[Line]) -> list[Contest]:
    """Group runs by cell and nodes at work, in the order of the page."""
    yards = record.by(record.of(lines, name=YARDSTICK), "cell")
    found = []
    for (cell, at_work), own in record.by(lines, "cell", "at_work").items():
        runs = {name: x for name, x in record.by(own, "name").items() if name != YARDSTICK}
        if runs:
            found.append(Contest(cell, at_work, runs, record.by_seed(yards[cell])))
    order = list(CELLS)
    return sorted(found, key=lambda contest: (order.index(contest.cell), contest.at_work))


def with_base(found: Sequence[Contest]) -> list[tuple[Contest, Duel]]:
    """Return the contests of ours and FedAvg, with ours against FedAvg after as much work."""
    both = [contest for contest in found if contest.runs.keys() >= {OURS, BASE}]
    return [(contest, contest.against(contest.runs[BASE], contest.runs[OURS])) for contest in both]


def details(contest: Contest) -> str:
    """Tabulate all methods of a cell with their costs and settings."""
    rows = []
    for name in contest.ranked():
        case = contest.runs[name][0]["case"]
        settings = ", ".join(f"{value}" for value in case["trial"] if value is not None)
        rows.append([*contest.row(name), settings, case["window"]])
    seeds = ", ".join(map(str, sorted(contest.yard)))
    table = tables.table([*HEAD, "rate, own settings", "models averaged"], rows)
    return f"### {contest.where}\n\nSeeds {seeds}.\n\n{table}\n"


def duels(found: Sequence[Contest]) -> dict[str, str]:
    """Hold ours against the best rival in each table, and count where it has what was wanted."""
    rows = []
    below_base = []
    for contest, base in with_base(found):
        duel = contest.duel()
        assert duel is not None
        faster = contest.faster(OURS, extremes=True)
        rival = f"{duel.rival}: {contest.faster(duel.rival)}"
        costs = contest.row(OURS)[3:5]
        points = " / ".join(base.points)
        rows.append([contest.where, faster, rival, duel.speedup, *costs, points])
        if not base.is_within(LESS_THAN_BASE, LESS_SLOW_THAN_BASE):
            below_base.append(f"{contest.where} ({points} of FedAvg's)")
    first = {contest.where: duel for contest in found if (duel := contest.duel())}
    late = [duel for contest in found if (duel := contest.duel(TARGETS[1]))]
    ahead = sum(duel.ratio >= ENOUGH for duel in first.values())
    behind = [where for where, duel in first.items() if duel.ratio < LEAST]
    lost = [where for where, duel in first.items() if not duel.is_within(LESS, LESS_SLOW)]
    summary = (
        f"Of {len(first)} tables ours, at FedAvg's rate, is at least {ENOUGH} times as fast as the "
        f"best rival in {ahead}, and less than {LEAST} times in {listed(behind)}. It loses more "
        f"than {100 * LESS:g} points, or {100 * LESS_SLOW:g} on the slowest tier's data, in "
        f"{listed(lost)}."
    )
    below = [f"{w} ({' / '.join(first[w].points)} of the best rival's end)" for w in lost]
    below += below_base
    return {
        "duels": tables.table(HEAD_DUELS, rows),
        "summary": summary,
        "ahead": f"{ahead} of {len(first)}",
        "late_behind": f"{sum(duel.ratio < 1 for duel in late)} of {len(late)}",
        "ends_missed": f"**missed** {'; '.join(below)}." if below else "it is.",
    }


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
        levels[title] = 100 * (mean(map(contest.target, yards)) + TARGETS[0])
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, path, *labels, levels=levels, xscale="log", ylim=(60, None))


def band(lines: Sequence[Line]) -> list[Any]:
    """Return times, and the mean and the extremes over seeds of the smoothed accuracy in %."""
    clocks = [line["curve"]["virtual_s"][SMOOTHED - 1 :] for line in lines]
    values = [100 * smooth(line) for line in lines]
    folded = [over_time(clocks, values, fold=fold) for fold in (np.mean, np.min, np.max)]
    return [folded[0][0], *(column for _, column in folded)]


def packed(found: Sequence[Contest], lines: Sequence[Line]) -> dict[str, str]:
    """Compare methods in few bits with the same methods and whole models, seed by seed."""
    in_bits = record.by(lines, "cell", "at_work", "name")
    rows = []
    missed = []
    for contest in found:
        pairs: dict[str, list[tuple[Line, Line]]] = {}
        for name in PACKED.get((contest.cell, contest.at_work), ()):
            runs = in_bits.get((contest.cell, contest.at_work, name), [])
            both = record.pairs(runs, contest.runs.get(name, []))
            if both:
                pairs[name] = both
        bits, whole = (
            contest._replace(runs={name: [pair[place] for pair in x] for name, x in pairs.items()})
            for place in (0, 1)
        )
        for name in bits.ranked():
            duel = contest.against(whole.runs[name], bits.runs[name])
            both_rows = [whole.row(name), bits.row(name)]
            # The columns are speed-up over FedAvg, bytes and the end.
            cells = [row[place] for place in (1, 3, 6) for row in both_rows]
            rows.append([contest.where, name, duel.speedup, *cells])
            if name == OURS:
                wanted = WANTED[contest.cell, contest.at_work]
                texts = missed_in_bits(wanted, duel, bits.share(OURS, "bytes"))
                missed += [f"{text} ({contest.where})" for text in texts]
    return {
        "packed": tables.table(HEAD_PACKED, rows),
        "packed_missed": "; ".join(missed) or "nothing",
    }


def missed_in_bits(wanted: Wanted, duel: Duel, share: float) -> list[str]:
    texts = []
    if duel.ratio < wanted.faster:
        texts.append(f"{duel.ratio:.2f} times as fast instead of {wanted.faster:g}")
    if share > wanted.bytes:
        texts.append(f"{share:.2f} of the bytes instead of {wanted.bytes:g}")
    if 100 * duel.more < -wanted.less:
        texts.append(f"{100 * duel.more:+.1f} points instead of -{wanted.less:g}")
    return texts


def wide(found: Sequence[Contest]) -> str:
    """Tabulate the cells of other fleets, with the late target, and what ours misses there."""
    rows = []
    missed = []
    ahead = 0
    for contest, base in with_base(found):
        duel = contest.duel()
        late = contest._replace(late=True).duel()
        assert duel is not None
        assert late is not None
        cell = contest.cell.removeprefix(WIDE)
        rival = f"{duel.rival}: {contest.rank(duel.rival):.0f}"
        seconds = f"{contest.rank(OURS):.0f}"
        speedups = [duel.speedup, late.speedup]
        rows.append([cell, len(contest.yard), seconds, rival, *speedups, ", ".join(base.points)])
        ahead += duel.ratio >= ENOUGH_WIDE
        if duel.ratio < LEAST_WIDE:
            missed.append(f"{duel.ratio:.2f} times as fast ({cell})")
        if late.ratio < LEAST_WIDE:
            missed.append(f"{late.ratio:.2f} times as fast to the late target ({cell})")
        if base.more < -LESS_THAN_BASE:
            missed.append(f"{base.points[0]} points of FedAvg's end ({cell})")
        if base.more_slow < -LESS_SLOW_THAN_BASE:
            missed.append(f"{base.points[1]} points on the slowest tier's data ({cell})")
    if ahead < 0.75 * len(rows):
        missed.insert(0, f"{ENOUGH_WIDE} times as fast in {ahead} of {len(rows)} cells")
    reached = f"{ENOUGH_WIDE} times as fast in {ahead} of {len(rows)} cells, at FedAvg's rate."
    text = f"At least {reached} **Missed**: {'; '.join(missed) or 'nothing'}."
    return f"{tables.table(HEAD_WIDE, rows)}\n{text}\n\n"


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups: Mapping[str, list[Line]] = {TUNING: [], IN_BITS: [], WIDE: [], "": []}
    for line in lines:
        experiment = line["case"]["experiment"]
        groups[next(kind for kind in groups if experiment.startswith(kind))].append(line)
    compared = contests(groups[""])
    # Two methods alone are no race.
    found = [contest for contest in compared if CELLS[contest.cell].methods != PAIR]
    if not found:
        return {}
    main = [line for line in lines if not line["case"]["cell"].startswith(WIDE)]
    num_tuning = sum(line["case"]["experiment"].startswith(TUNING) for line in main)
    picture(found, folder / "race.png")
    others = contests(groups[WIDE])
    parts: dict[str, Any] = {
        "rounds": ROUNDS,
        "num_tuning": num_tuning,
        "num_runs": len(main) - num_tuning,
        "core_s": round(sum(record.metric(main, "took_s"))),
        "software": record.software(main),
        "cells": "".join(map(details, [*found, *others])),
    }
    for contest in found:
        if (contest.cell, contest.at_work) == (MAIN, 5):
            rows = map(contest.row, contest.ranked())
            parts["methods"] = tables.only([*HEAD[:2], HEAD[3], *HEAD[6:]], HEAD, rows)
    parts |= duels(found) | packed(compared, groups[IN_BITS])
    return parts | ({"wide": wide(others)} if others else {})
