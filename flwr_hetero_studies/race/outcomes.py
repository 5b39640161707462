"""What runs took to their targets, beside FedAvg and against the best rival."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, isfinite, log
from statistics import mean
from typing import NamedTuple, TypeAlias

from flwr_hetero_studies.core import curves, record
from flwr_hetero_studies.core.curves import Vector, at
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import extent
from flwr_hetero_studies.race.methods import OURS
from flwr_hetero_studies.race.watch import SMOOTHED

TARGETS = (-0.01, 0.02)
"""Accuracies that count, relative to FedAvg's end."""
LESS, LESS_SLOW = 0.005, 0.01
"""Accuracy that may be lost: of all, and on the slowest tier's data."""
LESS_THAN_BASE, LESS_SLOW_THAN_BASE = 0.003, 0.005
"""Accuracy that ours may end below FedAvg, on all data and on the slowest tier's."""
COSTS = ("virtual_s", "bytes", "device_s", "examples")
Lines: TypeAlias = Sequence[Line]
HEAD = ["method", "sooner: less a point", "2 points above", "s to less a point", "bytes",
        "device-seconds", "examples", "end: all", "end: slowest tier"]  # fmt: skip


def smooth(line: Line) -> Vector:
    return curves.smooth(line["curve"]["all"], SMOOTHED, whole=True)


def reach(line: Line, target: float) -> dict[str, float]:
    """Return what a target took, by the first look at which the mean is there; infinite: never."""
    # NaN if never: then no comparison holds
    place = curves.reached(smooth(line), target)
    columns = {name: line["curve"][name][SMOOTHED - 1 :] for name in COSTS}
    return {name: at(c, place) if place >= 0 else inf for name, c in columns.items()}


def end(line: Line, name: str = "all") -> float:
    return curves.last(line, name, SMOOTHED)


def sooner(pairs: Sequence[tuple[float, float]], last_s: Sequence[float]) -> str:
    """Write how many times sooner than the yardstick, which may not get there by its end."""
    both = zip(pairs, last_s, strict=True)
    ratios = [min(theirs, end_s) / own for (own, theirs), end_s in both if isfinite(own)]
    if not ratios:
        return "not reached"
    # FedAvg did not get there: its time is at least its whole run
    at_least = any(isfinite(own) and not isfinite(theirs) for own, theirs in pairs)
    missed = f"; {len(pairs) - len(ratios)} of {len(pairs)} not" if len(ratios) < len(pairs) else ""
    return ("> " if at_least else "") + extent(ratios, "{:.1f}x") + missed


def brief(row: Sequence[str]) -> list[str]:
    """Leave out extremes: "2.0x (1.0x to 3.0x); 1 of 5 not" is "2.0x; 1 of 5 not"."""
    return [re.sub(r" \([^)]* to [^)]*\)", "", text) for text in row]


class Contest(NamedTuple):
    """One cell with so many nodes at work, and FedAvg with three nodes a round by seed."""

    cell: str
    at_work: int
    runs: Mapping[str, Lines]
    yard: Mapping[int, Line]

    @property
    def where(self) -> str:
        return f"{self.cell}, {self.at_work} at work"

    def reach(self, line: Line, shift: float) -> dict[str, float]:
        return reach(line, self.yard[line["seed"]]["metrics"]["limits"]["end"] + shift)

    def time_s(self, line: Line, shift: float, latest: Line | None = None) -> float:
        # ours that never gets there counts as late as FedAvg ends, a rival as its own run
        limit_s = (latest or self.yard[line["seed"]])["curve"]["virtual_s"][-1]
        return min(self.reach(line, shift)["virtual_s"], float(limit_s))

    def rank(self, name: str, shift: float) -> float:
        return exp(mean(log(self.time_s(line, shift)) for line in self.runs[name]))

    def ranked(self) -> list[str]:
        return sorted(self.runs, key=lambda name: self.rank(name, TARGETS[0]))

    def row(self, name: str) -> list[str]:
        lines = self.runs[name]
        yards = [self.yard[line["seed"]] for line in lines]
        both = [*zip(lines, yards, strict=True)]
        found = [[(self.reach(x, s), self.reach(y, s)) for x, y in both] for s in TARGETS]
        last_s = [yard["curve"]["virtual_s"][-1] for yard in yards]
        clocks = [[(x["virtual_s"], y["virtual_s"]) for x, y in pairs] for pairs in found]
        times = [sooner(pairs, last_s) for pairs in clocks]
        seconds = [own_s for own_s, _ in clocks[0] if isfinite(own_s)]
        costs = [shares((own[key], its[key]) for own, its in found[0]) for key in COSTS[1:]]
        ends = [f"{100 * mean(end(line, key) for line in lines):.1f}" for key in ("all", "slow")]
        return [name, *times, extent(seconds, "{:.1f}") if seconds else "", *costs, *ends]

    def against(self, base: Lines, own: Lines, shift: float = TARGETS[0]) -> "Duel":
        pairs = record.pairs(own, base)
        ratios = [self.time_s(b, shift, latest=b) / self.time_s(a, shift) for a, b in pairs]
        more, slow = (mean(end(a, key) - end(b, key) for a, b in pairs) for key in ("all", "slow"))
        reached = [isfinite(self.reach(x, shift)["virtual_s"]) for pair in pairs for x in pair]
        return Duel("", ratios, more, slow, any(reached))

    def duel(self, shift: float, own: str = OURS) -> "Duel | None":
        others = [name for name in self.runs if name != OURS]
        if own not in self.runs or not others:
            return None
        rival = min(others, key=lambda name: self.rank(name, shift))
        return self.against(self.runs[rival], self.runs[own], shift)._replace(rival=rival)


def shares(values: Iterable[tuple[float, float]]) -> str:
    known = [own / theirs for own, theirs in values if isfinite(own) and isfinite(theirs)]
    return extent(known) if known else ""


class Duel(NamedTuple):
    """Ours against the best rival of a table."""

    rival: str
    ratios: list[float]
    more: float
    more_slow: float
    reached: bool

    @property
    def ratio(self) -> float:
        return exp(mean(map(log, self.ratios)))

    @property
    def holds(self) -> bool:
        return self.more >= -LESS and self.more_slow >= -LESS_SLOW

    @property
    def cells(self) -> list[str]:
        ratio = f"{self.ratio:.2f}"
        if len(self.ratios) > 1:
            ratio += f" ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        points = [f"{100 * value:+.1f}" for value in (self.more, self.more_slow)]
        return [self.rival, ratio if self.reached else "neither gets there", *points]
