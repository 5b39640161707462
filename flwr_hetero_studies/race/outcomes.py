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
LESS = 0.005
LESS_SLOW = 0.01
"""Accuracy that ours may end below the best rival, on all data and on the slowest tier's."""
LESS_THAN_BASE = 0.003
LESS_SLOW_THAN_BASE = 0.005
"""Accuracy that ours may end below FedAvg, on all data and on the slowest tier's."""
COSTS = ("virtual_s", "bytes", "device_s", "examples")
Lines: TypeAlias = Sequence[Line]
HEAD = ["method", "faster: less a point", "2 points above", "s to less a point", "bytes",
        "device-seconds", "examples", "end: all", "end: slowest tier"]  # fmt: skip


def smooth(line: Line) -> Vector:
    return curves.smooth(line["curve"]["all"], SMOOTHED, whole=True)


def reach(line: Line, target: float) -> dict[str, float]:
    """Return what a target took, by the first look at which the mean is there; infinite: never."""
    place = curves.reached(smooth(line), target)
    costs = {}
    for name in COSTS:
        column = line["curve"][name][SMOOTHED - 1 :]
        # The place is NaN if the target is never reached, and then no comparison holds.
        costs[name] = at(column, place) if place >= 0 else inf
    return costs


def end(line: Line, name: str = "all") -> float:
    return curves.last(line, name, SMOOTHED)


def target_of(yard: Line) -> float:
    return float(yard["metrics"]["limits"]["end"])


def faster(pairs: Sequence[tuple[float, float]], last_s: Sequence[float]) -> str:
    """Write how many times as fast as the yardstick, which may not get there by its end."""
    both = zip(pairs, last_s, strict=True)
    ratios = [min(base_s, end_s) / own_s for (own_s, base_s), end_s in both if isfinite(own_s)]
    if not ratios:
        return "not reached"
    # Where FedAvg does not get there, its time is at least its whole run.
    is_bound = any(isfinite(own_s) and not isfinite(base_s) for own_s, base_s in pairs)
    text = ("> " if is_bound else "") + extent(ratios, "{:.1f}x")
    missed = len(pairs) - len(ratios)
    return text + (f"; {missed} of {len(pairs)} not" if missed else "")


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
        return reach(line, target_of(self.yard[line["seed"]]) + shift)

    def time_s(self, line: Line, shift: float, latest: Line | None = None) -> float:
        """Return the seconds to a target, at most those of the yardstick or of another run."""
        limit_s = (latest or self.yard[line["seed"]])["curve"]["virtual_s"][-1]
        return min(self.reach(line, shift)["virtual_s"], float(limit_s))

    def rank(self, name: str, shift: float = TARGETS[0]) -> float:
        return exp(mean(log(self.time_s(line, shift)) for line in self.runs[name]))

    def ranked(self) -> list[str]:
        return sorted(self.runs, key=self.rank)

    def best(self, names: Iterable[str], shift: float = TARGETS[0]) -> str:
        return min(names, key=lambda name: self.rank(name, shift))

    def row(self, name: str) -> list[str]:
        lines = self.runs[name]
        yards = [self.yard[line["seed"]] for line in lines]
        last_s = [yard["curve"]["virtual_s"][-1] for yard in yards]
        pairs = [*zip(lines, yards, strict=True)]
        reached = [[(self.reach(x, s), self.reach(y, s)) for x, y in pairs] for s in TARGETS]
        times = []
        for costs in reached:
            clocks = [(own["virtual_s"], base["virtual_s"]) for own, base in costs]
            times.append(faster(clocks, last_s))
        seconds = [own["virtual_s"] for own, _ in reached[0] if isfinite(own["virtual_s"])]
        shares = [share([(own[key], base[key]) for own, base in reached[0]]) for key in COSTS[1:]]
        ends = [f"{100 * mean(end(line, key) for line in lines):.1f}" for key in ("all", "slow")]
        return [name, *times, extent(seconds, "{:.1f}") if seconds else "", *shares, *ends]

    def against(self, base: Lines, own: Lines, shift: float = TARGETS[0]) -> "Duel":
        pairs = record.pairs(own, base)
        # Ours counts as there when FedAvg ends, a rival when its own run ends.
        ratios = [self.time_s(b, shift, latest=b) / self.time_s(a, shift) for a, b in pairs]
        more = mean(end(a) - end(b) for a, b in pairs)
        more_slow = mean(end(a, "slow") - end(b, "slow") for a, b in pairs)
        reached = [isfinite(self.reach(x, shift)["virtual_s"]) for pair in pairs for x in pair]
        return Duel(base[0]["case"]["name"], ratios, more, more_slow, any(reached))

    def duel(self, shift: float = TARGETS[0]) -> "Duel | None":
        """Hold ours against the best rival."""
        rivals = [name for name in self.runs if name != OURS]
        if OURS not in self.runs or not rivals:
            return None
        return self.against(self.runs[self.best(rivals, shift)], self.runs[OURS], shift)


def share(values: Sequence[tuple[float, float]]) -> str:
    ratios = [own / base for own, base in values if isfinite(own) and isfinite(base)]
    return extent(ratios) if ratios else ""


class Duel(NamedTuple):
    """Ours against a rival, seed by seed."""

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
    def speedup(self) -> str:
        if not self.reached:
            return "neither gets there"
        text = f"{self.ratio:.2f}"
        if len(self.ratios) > 1:
            text += f" ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        return text

    @property
    def points(self) -> list[str]:
        """Write accuracy at the end over the rival's, on all data and on the slowest tier's."""
        return [f"{100 * value:+.1f}" for value in (self.more, self.more_slow)]
