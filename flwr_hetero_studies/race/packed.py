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

HEAD = ["cell", "method", "times sooner", "than FedAvg: whole", f"{BITS} bits",
        "bytes: whole", f"{BITS} bits", "end: whole", f"{BITS} bits"]  # fmt: skip
HEAD_RIVALS = ["cell", "best rival", "times sooner", "points more", "slowest tier's"]


class Wanted(NamedTuple):
    """Of FedSlice in bits: times sooner than whole, bytes in FedAvg's, points that may be lost."""

    sooner: float = 0.0
    bytes: float = inf
    less: float = 0.3


WANTED = {
    ("10 Mbit/s", 5): Wanted(1.5, 0.6), ("10 Mbit/s", 20): Wanted(2.0, 2.0),
    ("log-normal", 5): Wanted(1.6), (MAIN, 5): Wanted(0.97),
    ("classes by speed", 5): Wanted(0.97), ("texts", 5): Wanted(less=0.5),
    ("CNN", 5): Wanted(less=0.5),
}  # fmt: skip


class Pair(NamedTuple):
    """The runs of a method in a cell, seed by seed: in bits, and with whole models."""

    bits: Contest
    whole: Contest

    def against(self, name: str) -> Duel:
        return self.whole.against(self.whole.runs[name], self.bits.runs[name])

    def row(self, name: str) -> list[str]:
        rows = [each.row(name) for each in (self.whole, self.bits)]
        # sooner than FedAvg, bytes, end
        columns = [row[place] for place in (1, 4, 7) for row in rows]
        return [self.bits.where, name, self.against(name).cells[1], *columns]

    def bytes(self) -> float:
        """Return FedSlice's bytes in bits to the target, in FedAvg's."""
        lines = self.bits.runs[OURS]
        both = [(self.bits.reach(x, TARGETS[0]), self.bits.yard[x["seed"]]) for x in lines]
        return mean(own["bytes"] / self.bits.reach(y, TARGETS[0])["bytes"] for own, y in both)

    def missed(self) -> list[str]:
        wanted = WANTED[self.bits.cell, self.bits.at_work]
        duel, where = self.against(OURS), self.bits.where
        texts = []
        if duel.ratio < wanted.sooner:
            texts.append(f"{duel.ratio:.2f} times sooner instead of {wanted.sooner:g} ({where})")
        if isfinite(wanted.bytes) and self.bytes() > wanted.bytes:
            texts.append(f"{self.bytes():.2f} of the bytes instead of {wanted.bytes:g} ({where})")
        if 100 * duel.more < -wanted.less:
            texts.append(f"{100 * duel.more:+.1f} points instead of -{wanted.less:g} ({where})")
        return texts


def pairs(found: Sequence[Contest], lines: Sequence[Line]) -> list[Pair]:
    """Pair contests with the runs in bits, and leave out what has not run in both ways."""
    result = []
    own = record.by(lines, "cell", "at_work", "name")
    for each in found:
        names = PACKED.get((each.cell, each.at_work), ())
        both = {
            name: record.pairs(own.get((each.cell, each.at_work, name), []), each.runs[name])
            for name in names if name in each.runs
        }  # fmt: skip
        known = {name: lines for name, lines in both.items() if lines}
        if known:
            bits, whole = ({n: [p[i] for p in of] for n, of in known.items()} for i in (0, 1))
            result.append(Pair(each._replace(runs=bits), each._replace(runs=whole)))
    return result


def section(found: Sequence[Contest], lines: Sequence[Line]) -> dict[str, str]:
    both = pairs(found, lines)
    rows = [pair.row(name) for pair in both for name in pair.bits.ranked()]
    races = [pair.bits for pair in both if not pair.bits.runs.keys() <= set(PAIR)]
    duels = [(each.where, each.duel(TARGETS[0])) for each in races]
    missed = [text for pair in both if OURS in pair.bits.runs for text in pair.missed()]
    cells = [[where, *duel.cells] for where, duel in duels if duel is not None]
    return {
        "packed": tables.table(HEAD, [[*row[:3], *brief(row[3:])] for row in rows]),
        "packed_in_full": tables.table(HEAD, rows),
        "packed_duels": tables.table(HEAD_RIVALS, cells),
        "packed_missed": "; ".join(missed) or "nothing",
    }
