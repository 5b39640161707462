"""How each method is tuned: with the same number of trials, first the rate, then its settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, TypeAlias

import numpy as np

from flwr_hetero_studies.core import curves, record
from flwr_hetero_studies.core.curves import Columns
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race.cells import ADDED, CELLS, MAIN, WIDE, case_of, rounds_in
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS, Entrant
from flwr_hetero_studies.race.watch import SMOOTHED, WINDOWS

DEVELOPMENT = (100, 101)
"""Seeds to tune with in the main cell; elsewhere only the first one."""
YARDSTICK = "yardstick"
"""FedAvg's long run, which sets targets and limits."""
YARDSTICK_AT_WORK = 3
LEVELS = (-0.03, -0.01, 0.01)
"""Accuracies, relative to FedAvg's end, whose times decide between settings."""
TUNED_AT = (5, 20)
Choice: TypeAlias = tuple[float, Any, Any]
"""A rate, and two settings of a method's own."""


def trials_of(method: Entrant, found: dict[Choice, float]) -> list[Choice]:
    """Return what to try next, by the scores so far, of which the least is the best."""
    # Begin with the usual values, and change one of them at a time.
    best: Choice = (method.rates[0], method.first[0], method.second[0])
    for place, values in enumerate((method.rates, method.first, method.second)):
        wanted = [(*best[:place], value, *best[place + 1 :]) for value in values]
        todo = [choice for choice in wanted if choice not in found]
        if todo:
            return todo
        best = min(wanted, key=lambda choice: found[choice])
    rate, first, second = best
    beyond = {min(method.rates): rate / 2, max(method.rates): rate * 2}
    if method.one_more and rate in beyond and len(found) == len(method.rates):
        return [(beyond[rate], first, second)]
    return []


def best_of(method: Entrant, found: dict[Choice, float]) -> Choice | None:
    return None if trials_of(method, found) else min(found, key=lambda choice: found[choice])


def scores_of(curve: Columns, limits: dict[str, float]) -> dict[str, float]:
    """Return the mean logarithm of the times to the levels, by window.

    A level that is never reached counts as reached after twice the time that there is.
    """
    clock = curve["virtual_s"][SMOOTHED - 1 :]
    never = 2 * limits["virtual_s"]
    scores = {}
    for window in WINDOWS:
        values = curves.smooth(curve[f"all/{window}"], SMOOTHED, whole=True)
        targets = [limits["end"] + level for level in LEVELS]
        times = [
            curves.time_to(clock, values, target, between=False, never=never) for target in targets
        ]
        scores[str(window)] = round(float(np.mean([log(max(at_s, 1e-9)) for at_s in times])), 4)
    return scores


@dataclass(frozen=True)
class Tuning:
    """What to try next, and what is chosen, by the lines so far."""

    options: Options
    lines: list[Line]

    @cached_property
    def tried(self) -> dict[tuple[str, str], list[Line]]:
        """The lines by experiment and name."""
        return record.by(self.lines, "experiment", "name")

    def yardstick(self, kind: str, cell: str, rate: float) -> tuple[Case, dict[int, Line]]:
        """Return the case of FedAvg's long runs, and the lines of those that exist, by seed."""
        case = case_of(kind, cell, YARDSTICK_AT_WORK, YARDSTICK, self.options, rate=rate)
        return case, record.by_seed(record.of(self.lines, **case))

    def plan(self, cell: str) -> Iterator[Trial]:
        rate, *_ = CELLS[cell].rates or METHODS[BASE].rates
        seeds = self.seeds(cell)
        case, yards = self.yardstick("tuning: ", cell, rate)
        yield from (Trial(case, seed, {"split": "valid"}) for seed in seeds)
        if not all(seed in yards for seed in seeds):
            return
        for at_work in (count for count in TUNED_AT if count in CELLS[cell].at_work):
            for name in CELLS[cell].methods or METHODS:
                method = self.method(cell, at_work, name) if name != OURS else None
                if method is None or not method.runs_with(at_work, CELLS[cell].nodes):
                    continue
                for choice in trials_of(method, self.scores(cell, at_work, name)):
                    case = case_of(
                        "tuning: ", cell, at_work, name, self.options, trial=list(choice)
                    )
                    for seed in seeds:
                        limits = yards[seed]["metrics"]["limits"]
                        yield Trial(case, seed, {"split": "valid", "limits": limits})

    def seeds(self, cell: str) -> list[int]:
        """Return the seeds to tune with: one in a fast run and outside the main cell."""
        return list(DEVELOPMENT[: None if cell == MAIN and not self.options.fast else 1])

    def method(self, cell: str, at_work: int, name: str) -> Entrant | None:
        """Return a method to tune: outside the main cell, all but its rate is settled."""
        method = METHODS[name]
        if cell == MAIN:
            return method
        is_wide = cell.startswith(WIDE)
        # The rivals that were added ran in these cells before they were tuned in the main one.
        if is_wide and name in ADDED:
            settings = [method.first[0], method.second[0]]
        else:
            main = self.choice(MAIN, at_work, name)
            if main is None:
                return None
            _, *settings = main[0]
        first, second = ([setting] for setting in settings)
        rates = CELLS[cell].rates
        return method._replace(first=first, second=second, rates=rates, one_more=is_wide)

    def scores(self, cell: str, at_work: int, name: str) -> dict[Choice, float]:
        found = self.by_window(cell, at_work, name)
        return {choice: min(windows.values()) for choice, windows in found.items()}

    def by_window(self, cell: str, at_work: int, name: str) -> dict[Choice, dict[int, float]]:
        """Return each trial's mean score by the window of averaging; the least is the best."""
        tried = self.tried.get((f"tuning: {cell}, {at_work} at work", name), [])
        found: dict[Choice, list[Line]] = {}
        for line in record.of(tried, rounds=rounds_in(cell, self.options)):
            found.setdefault(tuple(line["case"]["trial"]), []).append(line)
        return {
            choice: {w: float(np.mean([score(x, str(w)) for x in lines])) for w in WINDOWS}
            for choice, lines in found.items()
            # A mean over fewer seeds would not be comparable.
            if record.seeds(lines) == self.seeds(cell)
        }

    def choice(self, cell: str, at_work: int, name: str) -> tuple[Choice, int] | None:
        """Return the settings and the window of a method, or None while trials are left."""
        source = cell if CELLS[cell].rates else MAIN
        # By ratio, 3 nodes are nearer to 5 than to 20.
        nearest = min(TUNED_AT, key=lambda count: abs(log(count / at_work)))
        method = self.method(source, nearest, name)
        best = method and best_of(method, self.scores(source, nearest, name))
        if best is None:
            return None
        windows = self.by_window(source, nearest, name)[best]
        return best, min(windows, key=lambda window: windows[window])


def score(line: Line, window: str) -> float:
    """Return a trial's score; among those that reach no level, the accuracy at the end decides."""
    # Its weight is so small that it decides between equal scores only. Older lines lack it.
    end = line["metrics"].get("ends", {}).get(window, 0.0)
    return float(line["metrics"]["scores"][window] - 1e-3 * end)
