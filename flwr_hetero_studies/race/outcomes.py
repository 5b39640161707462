"""What runs took to their targets, beside FedAvg and against the best rival."""

from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite, log, nan
from statistics import mean
from typing import NamedTuple

from flwr_hetero_studies.core import curves, record
from flwr_hetero_studies.core.curves import Vector, at
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import extent
from flwr_hetero_studies.race.methods import OURS
from flwr_hetero_studies.race.watch import SMOOTHED

TARGETS = (-0.01, 0.02)
"""Accuracies that count, relative to FedAvg's end."""
COSTS = ("virtual_s", "bytes", "device_s", "examples")
HEAD = ["method", "faster: less a point", "2 points above", "bytes", "device-seconds",
        "examples", "end: all", "end: slowest tier"]  # fmt: skip


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
        return reach(line, self.target(self.yard[line["seed"]]) + shift)

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
        text += extent(ratios, "{:.1f}x") if extremes else f"{mean(ratios):.1f}x"
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
