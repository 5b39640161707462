"""What runs took to their targets, beside FedAvg and against the best rival."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, isfinite, log
from statistics import mean
from typing import NamedTuple

import numpy as np

from flwr_hetero_studies.core import curves, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race import cases
from flwr_hetero_studies.race.methods import OURS, OWN

ENOUGH, LEAST, LESS, LESS_SLOW = 1.5, 0.9, 0.005, 0.01
"""Ratio wanted of two thirds of the cells, and of all; points that may be lost: all, slowest."""


class Outcome(NamedTuple):
    """What one run took to a target, or that it never came there."""

    seconds: float
    bytes: float
    device_s: float
    examples: float


NEVER = Outcome(inf, inf, inf, inf)


# --- one run -------------------------------------------------------------------------------


def smooth(line: Line, name: str = "all") -> Vector:
    """Average each value with those just before it; the first few have no such mean."""
    return curves.smooth(line["curve"][name], cases.SMOOTHED)[cases.SMOOTHED - 1 :]


def column(line: Line, name: str) -> Vector:
    return np.asarray(line["curve"][name], float)[cases.SMOOTHED - 1 :]


def reach(line: Line, target: float) -> Outcome:
    """Return what a target took: the first look at which the mean is there."""
    place = curves.reached(smooth(line), target)
    if np.isnan(place):
        return NEVER
    names = ("virtual_s", "bytes", "device_s", "examples")
    return Outcome(*(float(column(line, name)[int(place)]) for name in names))


def end(line: Line, name: str = "all") -> float:
    return curves.last(line, name, cases.SMOOTHED)


def as_run(line: Line, window: int) -> Line:
    """Read a yardstick as a run of the race with the window that FedAvg was given."""
    curve = line["curve"]
    return line | {
        "curve": curve | {"all": curve[f"all/{window}"], "slow": curve[f"slow/{window}"]}
    }


# --- a table of methods --------------------------------------------------------------------


def sooner(pairs: Sequence[tuple[float, float]], last_s: Sequence[float]) -> str:
    """Write how many times sooner than the yardstick, which may not get there by its end."""
    ratios = [
        min(theirs, end_s) / own
        for (own, theirs), end_s in zip(pairs, last_s, strict=True)
        if isfinite(own)
    ]
    if not ratios:
        return "not reached"
    at_least = any(isfinite(own) and not isfinite(theirs) for own, theirs in pairs)
    missed = f"; {len(pairs) - len(ratios)} of {len(pairs)} not" if len(ratios) < len(pairs) else ""
    return ("> " if at_least else "") + tables.extent(ratios, "{:.1f}x") + missed


def shares(values: Iterable[tuple[float, float]]) -> str:
    """Write costs as shares of the yardstick's."""
    known = [own / theirs for own, theirs in values if isfinite(own) and isfinite(theirs)]
    return tables.extent(known) if known else ""


def row(name: str, lines: Sequence[Line], yard: Mapping[int, Line]) -> list[str]:
    """One method against FedAvg with three nodes a round, seed by seed."""
    found: dict[float, list[tuple[Outcome, Outcome]]] = {}
    for shift in cases.TARGETS:
        targets = {seed: line["metrics"]["limits"]["end"] + shift for seed, line in yard.items()}
        found[shift] = [
            (reach(line, targets[line["seed"]]), reach(yard[line["seed"]], targets[line["seed"]]))
            for line in lines
        ]
    last_s = [yard[line["seed"]]["curve"]["virtual_s"][-1] for line in lines]
    first = found[cases.TARGETS[0]]
    times = [
        sooner([(own.seconds, theirs.seconds) for own, theirs in pairs], last_s)
        for pairs in found.values()
    ]
    seconds = [own.seconds for own, _ in first if isfinite(own.seconds)]
    costs = [
        shares((getattr(own, key), getattr(theirs, key)) for own, theirs in first)
        for key in ("bytes", "device_s", "examples")
    ]
    ends = [f"{100 * mean(end(line, key) for line in lines):.1f}" for key in ("all", "slow")]
    return [name, *times, tables.extent(seconds, "{:.1f}") if seconds else "", *costs, *ends]


HEAD = ["method", "sooner: less a point", "2 points above", "s to less a point", "bytes",
        "device-seconds", "examples", "end: all", "end: slowest tier"]  # fmt: skip


# --- against the best rival ------------------------------------------------------------------


def rank(lines: Sequence[Line], yard: Mapping[int, Line], shift: float) -> float:
    """Return the geometric mean of the times to a target; never: FedAvg's whole time."""
    return exp(mean(log(time_s(line, yard[line["seed"]], shift)) for line in lines))


def time_s(line: Line, yard: Line, shift: float) -> float:
    limit = yard["curve"]["virtual_s"][-1]
    return min(reach(line, yard["metrics"]["limits"]["end"] + shift).seconds, limit)


def at_least_s(line: Line, yard: Line, shift: float) -> float:
    """Return the time to a target, or that of the end of a run that does not get there."""
    target = yard["metrics"]["limits"]["end"] + shift
    return min(reach(line, target).seconds, line["curve"]["virtual_s"][-1])


class Duel(NamedTuple):
    """Ours against the best rival of a table."""

    rival: str
    ratios: list[float]
    more: float
    more_slow: float
    reached: bool

    @property
    def ratio(self) -> float:
        """Geometric mean over the seeds."""
        return exp(mean(map(log, self.ratios)))

    @property
    def holds(self) -> bool:
        """Whether accuracy is within what may be lost."""
        return self.more >= -LESS and self.more_slow >= -LESS_SLOW


def duel(runs: Mapping[str, Sequence[Line]], yard: Mapping[int, Line], shift: float) -> Duel | None:
    """Compare ours with the quickest rival, seed by seed."""
    others = {name: lines for name, lines in runs.items() if name not in OWN}
    if OURS not in runs or not others:
        return None
    rival = min(others, key=lambda name: rank(others[name], yard, shift))
    pairs = record.pairs(runs[OURS], others[rival])
    ratios = [
        at_least_s(theirs, yard[own["seed"]], shift) / time_s(own, yard[own["seed"]], shift)
        for own, theirs in pairs
    ]
    more, slow = (mean(end(a, key) - end(b, key) for a, b in pairs) for key in ("all", "slow"))
    targets = [yard[own["seed"]]["metrics"]["limits"]["end"] + shift for own, _ in pairs]
    got = any(isfinite(reach(x, t).seconds) for p, t in zip(pairs, targets, strict=True) for x in p)
    return Duel(rival, ratios, more, slow, got)


def against(base: Sequence[Line], runs: Sequence[Line], yard: Mapping[int, Line]) -> list[str]:
    """Compare runs with others of the same seeds: times sooner to the first target, and points."""
    shift, pairs = cases.TARGETS[0], record.pairs(runs, base)
    ratios = [
        at_least_s(theirs, yard[own["seed"]], shift) / time_s(own, yard[own["seed"]], shift)
        for own, theirs in pairs
    ]
    more = [mean(end(a, key) - end(b, key) for a, b in pairs) for key in ("all", "slow")]
    return [tables.extent(ratios), *(f"{100 * value:+.1f}" for value in more)]


def duel_row(where: str, found: Duel) -> list[str]:
    ratio = f"{found.ratio:.2f} ({min(found.ratios):.2f} to {max(found.ratios):.2f})"
    points = [f"{100 * value:+.1f}" for value in (found.more, found.more_slow)]
    return [
        where,
        found.rival,
        ratio if found.reached else "neither gets there",
        *points,
    ]
