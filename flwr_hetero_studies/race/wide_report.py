"""The tables of the wider race: ours, at FedAvg's rate, against the best rival."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean
from typing import NamedTuple

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race.methods import BASE, COMPOSED, OURS
from flwr_hetero_studies.race.outcomes import (
    HEAD,
    LESS_SLOW_THAN_BASE,
    LESS_THAN_BASE,
    TARGETS,
    Contest,
    Duel,
)
from flwr_hetero_studies.race.tuning import YARDSTICK
from flwr_hetero_studies.race.wide import (
    AT_WORK,
    POOLED,
    RUNS,
    TUNING,
    WIDE,
    names_in,
)

AHEAD, LEAST, MOST_EXAMPLES = 1.3, 1.0, 2.2
"""Wanted: ratios of three quarters of the cells and of all; examples, in those of pooled SGD."""
HEAD_CELLS = ["cell", "seeds", "s", "best rival: its s", "times sooner",
              "to the late target", "points more than FedAvg, slowest tier's"]  # fmt: skip


def is_wide(line: Line) -> bool:
    return str(line["case"]["experiment"]).startswith((RUNS, TUNING))


class Found(NamedTuple):
    """A cell that was run: against its target, and against the late one."""

    first: Contest
    late: Contest

    @property
    def rival(self) -> str:
        others = [n for n in self.first.runs if n not in (OURS, POOLED)]
        return min(others, key=lambda name: self.first.rank(name, TARGETS[0]))

    def duel(self, base: str = "") -> Duel:
        runs = self.first.runs
        return self.first.against(runs[base or self.rival], runs[OURS])

    def late_duel(self) -> Duel:
        runs, shift = self.late.runs, TARGETS[0]
        others = [n for n in runs if n not in (OURS, POOLED)]
        rival = min(others, key=lambda name: self.late.rank(name, shift))
        return self.late.against(runs[rival], runs[OURS], shift)._replace(rival=rival)

    def row(self) -> list[str]:
        cell, seeds = self.first.cell, str(len(self.first.yard))
        ours_s, its_s = (f"{self.first.rank(n, TARGETS[0]):.0f}" for n in (OURS, self.rival))
        ends = ", ".join(self.duel(BASE).cells[2:])
        ratios = self.duel().cells[1], self.late_duel().cells[1]
        return [cell, seeds, ours_s, f"{self.rival}: {its_s}", *ratios, ends]

    def missed(self) -> list[str]:
        cell, texts = self.first.cell, list[str]()
        ratio, late, ends = self.duel().ratio, self.late_duel(), self.duel(BASE)
        if ratio < LEAST:
            texts.append(f"{ratio:.2f} times as soon ({cell})")
        if late.reached and late.ratio < LEAST:
            texts.append(f"{late.ratio:.2f} times as soon to the late target ({cell})")
        if ends.more < -LESS_THAN_BASE:
            texts.append(f"{100 * ends.more:+.1f} points of FedAvg's end ({cell})")
        if ends.more_slow < -LESS_SLOW_THAN_BASE:
            less = f"{100 * ends.more_slow:+.1f} points on the slowest tier's data"
            texts.append(f"{less} ({cell})")
        return texts


def cells_of(lines: Sequence[Line]) -> list[Found]:
    """Return the cells in which ours and a rival of two parts have run with the same seeds."""
    found = []
    own = [line for line in lines if line["case"]["experiment"].startswith(RUNS)]
    for cell in WIDE:
        runs = record.by(record.of(own, cell=cell), "name")
        yards = {line["seed"]: line for line in runs.pop(YARDSTICK, [])}
        # what is not there with all seeds is not run yet
        runs = {name: x for name, x in runs.items() if {each["seed"] for each in x} == {*yards}}
        if not yards or not runs.keys() >= {BASE, OURS, COMPOSED}:
            continue
        late = {seed: later(line) for seed, line in yards.items()}
        contest = Contest(cell, AT_WORK, runs, yards)
        found.append(Found(contest, contest._replace(yard=late)))
    return found


def later(line: Line) -> Line:
    """Set a yardstick's target to the end of its whole run."""
    limits = line["metrics"]["limits"]
    return line | {"metrics": line["metrics"] | {"limits": limits | {"end": limits["late"]}}}


def limit(main: Contest) -> tuple[str, list[str]]:
    """Write what SGD on the pooled data takes; return where FedSlice takes too much more."""
    if POOLED not in main.runs:
        return "SGD on the pooled data has not been run yet.\n", []
    names, rows, missed = (POOLED, OURS), [], []
    for name in names:
        found = [main.reach(line, TARGETS[0])["examples"] for line in main.runs[name]]
        known = [count for count in found if isfinite(count)]
        if known:
            rows.append((name, mean(known)))
    for name, count in rows[1:]:
        if (share := count / rows[0][1]) > MOST_EXAMPLES:
            missed.append(f"{share:.1f} times the examples of pooled data (main, {name})")
    head = ["examples to FedAvg's end less a point, main cell", "", "in those of pooled data"]
    cells = [[name, f"{count:.0f}", f"{count / rows[0][1]:.1f}"] for name, count in rows]
    return tables.table(head, cells), missed


def details(each: Found) -> str:
    contest, seeds = each.first, sorted(each.first.yard)
    names = [name for name in contest.runs if name != POOLED]
    names.sort(key=lambda name: contest.rank(name, TARGETS[0]))
    rows = []
    for name in names:
        case = contest.runs[name][0]["case"]
        models = "newest" if case["window"] == 1 else str(case["window"])
        rows.append([*contest.row(name), f"{case['rate']:g}", models])
    head = [*HEAD, "rate", "models averaged"]
    text = f"### {contest.cell}\n\nSeeds {', '.join(map(str, seeds))}."
    return f"{text}\n\n{tables.table(head, rows)}\n"


def unrun(contest: Contest) -> list[str]:
    return [f"{n} ({contest.cell})" for n in names_in(contest.cell) if n not in contest.runs]


def section(lines: Sequence[Line]) -> dict[str, str]:
    own = [line for line in lines if is_wide(line)]
    if not (found := cells_of(own)):
        return {}
    known = [each.first.cell for each in found]
    left = [cell for cell in WIDE if cell not in known]
    left += [text for each in found for text in unrun(each.first)]
    missed = [text for each in found for text in each.missed()]
    ahead = sum(each.duel().ratio >= AHEAD for each in found)
    if ahead < 0.75 * len(found):
        missed.insert(0, f"{AHEAD} times as soon in {ahead} of {len(found)} cells")
    text = tables.table(HEAD_CELLS, [each.row() for each in found])
    for each in (each for each in found if each.first.cell == "main"):
        row, too_many = limit(each.first)
        text, missed = f"{text}\n{row}", [*missed, *too_many]
    text += f"\nAt least {AHEAD} times as soon in {ahead} of {len(found)} cells, at FedAvg's rate. "
    text += f"**Missed**: {'; '.join(missed) or 'nothing'}.\n\n"
    few = [
        each.first.cell for each in found if len(each.first.yard) < WIDE[each.first.cell].cell.seeds
    ]
    left += [f"more seeds ({', '.join(few)})"] if few else []
    if left:
        text += f"Planned, **not run yet**: {'; '.join(left)}.\n"
    return {"wide": text, "wide_cells": "".join(map(details, found))}
