"""The tables of the wider race: ours, at FedAvg's rate, against the best rival."""

from collections.abc import Sequence
from typing import NamedTuple

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race.methods import BASE, COMPOSED, OURS
from flwr_hetero_studies.race.outcomes import (
    HEAD,
    LESS_SLOW_THAN_BASE,
    LESS_THAN_BASE,
    Contest,
    Duel,
)
from flwr_hetero_studies.race.tuning import YARDSTICK
from flwr_hetero_studies.race.wide import AT_WORK, RUNS, TUNING, WIDE

AHEAD = 1.3
"""Speed-up over the best rival that was wanted in three quarters of the cells."""
LEAST = 1.0
"""Speed-up over the best rival that was wanted in all cells."""
HEAD_CELLS = ["cell", "seeds", "s", "best rival: its s", "times faster",
              "to the late target", "points more than FedAvg, slowest tier's"]  # fmt: skip


def is_wide(line: Line) -> bool:
    return str(line["case"]["experiment"]).startswith((RUNS, TUNING))


class WideContest(NamedTuple):
    """A cell that was run, with its target and with the late target."""

    first: Contest
    late: Contest

    @property
    def duel(self) -> Duel:
        return ours_against_best(self.first)

    @property
    def late_duel(self) -> Duel:
        return ours_against_best(self.late)

    @property
    def ends(self) -> Duel:
        """Ours against FedAvg after as much work."""
        return self.first.against(self.first.runs[BASE], self.first.runs[OURS])

    def row(self) -> list[str]:
        duel = self.duel
        ours_s = f"{self.first.rank(OURS):.0f}"
        rival = f"{duel.rival}: {self.first.rank(duel.rival):.0f}"
        speedups = [duel.speedup, self.late_duel.speedup]
        points = ", ".join(self.ends.points)
        return [self.first.cell, str(len(self.first.yard)), ours_s, rival, *speedups, points]

    def missed(self) -> list[str]:
        late = self.late_duel
        ends = self.ends
        texts = []
        if self.duel.ratio < LEAST:
            texts.append(f"{self.duel.ratio:.2f} times as fast")
        if late.reached and late.ratio < LEAST:
            texts.append(f"{late.ratio:.2f} times as fast to the late target")
        if ends.more < -LESS_THAN_BASE:
            texts.append(f"{ends.points[0]} points of FedAvg's end")
        if ends.more_slow < -LESS_SLOW_THAN_BASE:
            texts.append(f"{ends.points[1]} points on the slowest tier's data")
        return [f"{text} ({self.first.cell})" for text in texts]


def ours_against_best(contest: Contest) -> Duel:
    duel = contest.duel()
    # A cell is reported only if ours and a rival have run.
    assert duel is not None
    return duel


def contests_of(lines: Sequence[Line]) -> list[WideContest]:
    """Return the cells in which ours and a composed rival have run with all seeds."""
    found = []
    reported = [line for line in lines if line["case"]["experiment"].startswith(RUNS)]
    for cell in WIDE:
        runs = record.by(record.of(reported, cell=cell), "name")
        yards = record.by_seed(runs.pop(YARDSTICK, []))
        runs = {name: x for name, x in runs.items() if record.seeds(x) == sorted(yards)}
        if yards and runs.keys() >= {BASE, OURS, COMPOSED}:
            contest = Contest(cell, AT_WORK, runs, yards)
            late = {seed: with_late_target(yard) for seed, yard in yards.items()}
            found.append(WideContest(contest, contest._replace(yard=late)))
    return found


def with_late_target(yard: Line) -> Line:
    """Set a yardstick's target to the end of its whole run."""
    limits = yard["metrics"]["limits"]
    return yard | {"metrics": yard["metrics"] | {"limits": limits | {"end": limits["late"]}}}


def details(contest: Contest) -> str:
    rows = []
    for name in contest.ranked():
        case = contest.runs[name][0]["case"]
        models = "newest" if case["window"] == 1 else str(case["window"])
        rows.append([*contest.row(name), f"{case['rate']:g}", models])
    seeds = ", ".join(map(str, sorted(contest.yard)))
    table = tables.table([*HEAD, "rate", "models averaged"], rows)
    return f"### {contest.cell}\n\nSeeds {seeds}.\n\n{table}\n"


def section(lines: Sequence[Line]) -> dict[str, str]:
    contests = contests_of([line for line in lines if is_wide(line)])
    if not contests:
        return {}
    text = tables.table(HEAD_CELLS, [contest.row() for contest in contests])
    missed = [miss for contest in contests for miss in contest.missed()]
    ahead = sum(contest.duel.ratio >= AHEAD for contest in contests)
    if ahead < 0.75 * len(contests):
        missed.insert(0, f"{AHEAD} times as fast in {ahead} of {len(contests)} cells")
    text += (
        f"\nAt least {AHEAD} times as fast in {ahead} of {len(contests)} cells, at FedAvg's rate."
    )
    text += f" **Missed**: {'; '.join(missed) or 'nothing'}.\n\n"
    return {"wide": text, "wide_cells": "".join(details(contest.first) for contest in contests)}
