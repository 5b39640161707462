"""What compression brings: each method with whole models and in few bits, and what was wanted."""

from collections.abc import Sequence
from math import inf, isfinite
from statistics import mean
from typing import NamedTuple

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race.cases import BITS
from flwr_hetero_studies.race.cells import MAIN, PACKED, PAIR
from flwr_hetero_studies.race.methods import OURS
from flwr_hetero_studies.race.outcomes import TARGETS, Contest, Duel, brief

HEAD = ["cell", "method", "times faster", "than FedAvg: whole", f"{BITS} bits",
        "bytes: whole", f"{BITS} bits", "end: whole", f"{BITS} bits"]  # fmt: skip
HEAD_RIVALS = ["cell", "best rival", "times faster", "points more", "slowest tier's"]


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


class Pair(NamedTuple):
    """The runs of methods in a cell with the same seeds: in bits, and with whole models."""

    bits: Contest
    whole: Contest

    def against(self, name: str) -> Duel:
        return self.whole.against(self.whole.runs[name], self.bits.runs[name])

    def row(self, name: str) -> list[str]:
        whole = self.whole.row(name)
        bits = self.bits.row(name)
        # The columns are speed-up over FedAvg, bytes and the end.
        cells = [row[place] for place in (1, 4, 7) for row in (whole, bits)]
        return [self.bits.where, name, self.against(name).speedup, *cells]

    def bytes(self) -> float:
        """Return FedSlice's bytes in bits to the target, as a multiple of FedAvg's."""
        shares = []
        for line in self.bits.runs[OURS]:
            base = self.bits.reach(self.bits.yard[line["seed"]], TARGETS[0])
            shares.append(self.bits.reach(line, TARGETS[0])["bytes"] / base["bytes"])
        return mean(shares)

    def missed(self) -> list[str]:
        wanted = WANTED[self.bits.cell, self.bits.at_work]
        duel = self.against(OURS)
        where = self.bits.where
        texts = []
        if duel.ratio < wanted.faster:
            texts.append(f"{duel.ratio:.2f} times as fast instead of {wanted.faster:g} ({where})")
        if isfinite(wanted.bytes) and self.bytes() > wanted.bytes:
            texts.append(f"{self.bytes():.2f} of the bytes instead of {wanted.bytes:g} ({where})")
        if 100 * duel.more < -wanted.less:
            texts.append(f"{100 * duel.more:+.1f} points instead of -{wanted.less:g} ({where})")
        return texts


def pairs(contests: Sequence[Contest], lines: Sequence[Line]) -> list[Pair]:
    """Pair contests with the runs in bits, and leave out what has not run in both ways."""
    found = []
    packed = record.by(lines, "cell", "at_work", "name")
    for contest in contests:
        bits = {}
        whole = {}
        for name in PACKED.get((contest.cell, contest.at_work), ()):
            runs = packed.get((contest.cell, contest.at_work, name), [])
            both = record.pairs(runs, contest.runs.get(name, []))
            if both:
                bits[name] = [line for line, _ in both]
                whole[name] = [line for _, line in both]
        if bits:
            found.append(Pair(contest._replace(runs=bits), contest._replace(runs=whole)))
    return found


def section(contests: Sequence[Contest], lines: Sequence[Line]) -> dict[str, str]:
    found = pairs(contests, lines)
    rows = [pair.row(name) for pair in found for name in pair.bits.ranked()]
    duels = []
    for pair in found:
        duel = pair.bits.duel()
        # Two methods alone are no race.
        if duel is not None and not pair.bits.runs.keys() <= set(PAIR):
            duels.append([pair.bits.where, duel.rival, duel.speedup, *duel.points])
    missed = [text for pair in found if OURS in pair.bits.runs for text in pair.missed()]
    return {
        "packed": tables.table(HEAD, [[*row[:3], *brief(row[3:])] for row in rows]),
        "packed_in_full": tables.table(HEAD, rows),
        "packed_duels": tables.table(HEAD_RIVALS, duels),
        "packed_missed": "; ".join(missed) or "nothing",
    }
