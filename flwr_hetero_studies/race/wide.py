"""Fleets, optimisers and networks on which FedSlice had lost.

The plan is on the page, ``page.template``, and was written before its runs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.core import record
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race.cells import ADDED, MAIN, TEXTS, UNRELIABLE, RaceCell, mild, paper_5
from flwr_hetero_studies.race.methods import (
    BASE,
    COMPOSED,
    EAGER,
    METHODS,
    OURS,
    OWN_AVERAGE,
    QUICK,
    RESCALED,
    RINGLEADER,
    Base,
    draw,
    fedavg,
)
from flwr_hetero_studies.race.node import NORMED
from flwr_hetero_studies.race.tuning import DEVELOPMENT, LEVELS, YARDSTICK, scores_of
from flwr_hetero_studies.race.watch import WINDOWS, Limits, end_of, place_of, race, with_window

RUNS = "wide: "
TUNING = "wide tuning: "
AT_WORK = 5
LONG = 3
"""FedAvg trains so many times as long as until the end that sets the target."""
TUNED_SHARE = 2 / 3
MOST_RATES = 4


def two_kinds(seed: int) -> list[DeviceProfile]:
    # The fastest kind comes first, as in the named fleets.
    return [DeviceProfile(4.0)] * 6 + [DeviceProfile(0.5)] * 14


def phones(seed: int) -> list[DeviceProfile]:
    """Draw phones that were measured; the median one is as quick as the reference device."""
    measured = json.loads((Path(__file__).parent / "phones.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng([seed, 11])
    scores = rng.choice(measured["score"], 20) / np.median(measured["score"])
    profiles = []
    for speed, link in zip(
        scores.tolist(), rng.integers(len(measured["down_kBps"]), size=20).tolist(), strict=True
    ):
        up_mbps, down_mbps = (measured[f"{way}_kBps"][link] * 8e-3 for way in ("up", "down"))
        profiles.append(DeviceProfile(speed, uplink_mbps=up_mbps, downlink_mbps=down_mbps))
    return profiles


def adam_base() -> FedAvg:
    return FedAdam(fraction_evaluate=0.0, eta=0.01, tau=1e-3)


def momentum_base() -> FedAvg:
    return FedAvgM(fraction_evaluate=0.0, server_learning_rate=1.0, server_momentum=0.9)


def damped() -> FedAvg:
    """Make FedBuff's server momentum, at the rate with which the model moves no further in all."""
    return FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.1, server_momentum=0.9)


class Wide(NamedTuple):
    """A cell, with what it changes in the nodes' optimizer and in the strategy of Flower."""

    cell: RaceCell
    base: Base = fedavg
    optimizer: str = "sgd"
    rates: tuple[float, float, float] = (0.1, 0.05, 0.2)
    """Rates to try first; they are doubled or halved while the best one is at an end."""
    rivals: tuple[str, ...] = ADDED
    rounds: int = 40


MOMENTUM = "FedBuff, server momentum"
SETTINGS: dict[str, tuple[Any, Any]] = {
    BASE: (None, None),
    OURS: (None, None),
    COMPOSED: (20, 0.8),
    "FedCompass": (10, 20),
    EAGER: (0.5, None),
    "FedProx, partial work": (0.1, 20),
    "over-selection": (0.6, None),
    MOMENTUM: (0.5, None),
    RINGLEADER: (5, 2.0),
    RESCALED: (None, 0.25),
    QUICK: (0.2, None),
}
"""Both settings of each method, as tuned in the main cell. Only rates are tuned here."""
ADAM_RATES = (0.001, 0.0005, 0.002)
MOMENTUM_RATES = (0.01, 0.005, 0.02)
TEXT_RATES = (1.0, 0.5, 2.0)
SMALLER = (3000, 1000, 2000)
WIDE: dict[str, Wide] = {
    "two kinds": Wide(RaceCell(two_kinds), rivals=(*ADDED, "FedCompass")),
    "main": Wide(RaceCell(paper_5()), rivals=tuple(n for n in SETTINGS if n not in (BASE, OURS))),
    "momentum": Wide(RaceCell(paper_5()), fedavg, "momentum", MOMENTUM_RATES),
    "FedAvgM": Wide(RaceCell(paper_5()), momentum_base),
    "FedAdam": Wide(RaceCell(paper_5()), adam_base),
    "Adam": Wide(RaceCell(paper_5()), fedavg, "adam", ADAM_RATES),
    "phones": Wide(RaceCell(phones)),
    "6 s a message": Wide(RaceCell(paper_5(wait_s=3.8, start_s=2.2))),
    "CNN": Wide(RaceCell(paper_5(), model=NORMED, rows=SMALLER), rounds=20),
    "1 s a message": Wide(RaceCell(paper_5(wait_s=0.6, start_s=0.4))),
    "mild": Wide(RaceCell(mild)),
    "unreliable": Wide(RaceCell(UNRELIABLE)),
    "two kinds, momentum": Wide(RaceCell(two_kinds), fedavg, "momentum", MOMENTUM_RATES),
    "texts": Wide(RaceCell(paper_5(), MAIN, "stdlib", "bag", rows=TEXTS), rates=TEXT_RATES),
}


def names_in(cell: str) -> list[str]:
    return [BASE, OURS, *WIDE[cell].rivals]


def case_of(kind: str, cell: str, name: str, rate: float, **more: Any) -> Case:
    case = {"experiment": f"{kind}{cell}", "name": name, "cell": cell, "rate": rate}
    return case | {"rounds": WIDE[cell].rounds, **more}


def next_rates(first: Sequence[float], scores: Mapping[float, float]) -> list[float]:
    """Return the rates to try next, by the scores so far, of which the least is the best.

    >>> next_rates((0.1, 0.05, 0.2), {0.1: 3.0, 0.05: 2.0, 0.2: 4.0})
    [0.025]
    """
    todo = [rate for rate in first if rate not in scores]
    if todo or len(scores) >= MOST_RATES:
        return todo
    best = min(scores, key=lambda rate: scores[rate])
    if best == min(scores):
        return [best / 2]
    return [best * 2] if best == max(scores) else []


@dataclass(frozen=True)
class Tuned:
    """What the lines so far say of a cell's rates."""

    lines: Sequence[Line]
    cell: str

    def scores(self, name: str) -> dict[float, dict[int, float]]:
        """Return the scores by rate and number of models averaged."""
        tried = record.of(self.lines, experiment=TUNING + self.cell, name=name)
        return {
            line["case"]["rate"]: {w: line["metrics"]["scores"][str(w)] for w in WINDOWS}
            for line in tried
        }

    def todo(self, name: str) -> list[float]:
        scores = {rate: min(by_window.values()) for rate, by_window in self.scores(name).items()}
        return next_rates(WIDE[self.cell].rates, scores)

    def best(self, name: str) -> tuple[float, int] | None:
        """Return the rate and the models averaged, or None while there are rates to try."""
        if self.todo(name):
            return None
        scores = self.scores(name)
        rate = min(scores, key=lambda rate: min(scores[rate].values()))
        return rate, min(scores[rate], key=lambda window: scores[rate][window])


def plan(options: Options, lines: Sequence[Line]) -> Iterator[Trial]:
    """Plan cell by cell: FedAvg's long run, all methods' rates, then the runs to report."""
    seed, *_ = DEVELOPMENT
    for cell, wide in WIDE.items():
        if wide.cell.data != options.data:
            continue
        tuned = Tuned(lines, cell)
        case = case_of(TUNING, cell, YARDSTICK, wide.rates[0])
        yield Trial(case, seed, {"split": "valid"})
        yards = record.of(lines, **case)
        if not yards:
            continue
        given = {"split": "valid", "limits": yards[0]["metrics"]["limits"]}
        for name in (BASE, *wide.rivals):
            for rate in tuned.todo(name):
                yield Trial(case_of(TUNING, cell, name, rate), seed, given)
        yield from reported(options, tuned)


def reported(options: Options, tuned: Tuned) -> Iterator[Trial]:
    base = tuned.best(BASE)
    if base is None:
        return
    rate, window = base
    yard = case_of(RUNS, tuned.cell, YARDSTICK, rate, window=window)
    yards = record.by_seed(record.of(tuned.lines, **yard))
    seeds = options.seeds_or(range(WIDE[tuned.cell].cell.seeds))
    yield from (Trial(yard, seed, {"split": "test"}) for seed in seeds)
    for name in names_in(tuned.cell):
        best = (rate, OWN_AVERAGE) if name == OURS else tuned.best(name)
        if best is None:
            continue
        case = case_of(RUNS, tuned.cell, name, best[0], window=best[1])
        for seed in seeds:
            if seed in yards:
                limits = yards[seed]["metrics"]["limits"]
                yield Trial(case, seed, {"split": "test", "limits": limits})


def run(
    case: Case, seed: int, data: Data, split: str, limits: dict[str, float] | None = None
) -> dict[str, Any]:
    wide = WIDE[case["cell"]]
    cell = wide.cell
    name = case["name"]
    window = case.get("window", 1)
    most = LONG * case["rounds"] * cell.examples_a_round
    look = 1.5 * cell.examples_a_round
    learning = cell.learning(data, seed, wide.optimizer)
    if limits is None:
        strategy = draw(wide.base(), 3, seed)
        bounds = Limits(inf, most, look)
    else:
        method = METHODS[EAGER if name == MOMENTUM else name]
        base = damped if name == MOMENTUM else wide.base
        strategy = method.build(AT_WORK, seed, *SETTINGS[name], base)
        bounds = Limits(limits["virtual_s"], most, look)
        if split == "valid":
            # What comes after the last level does not matter for the choice of a rate.
            level = limits["end"] + LEVELS[-1]
            bounds = Limits(TUNED_SHARE * limits["virtual_s"], TUNED_SHARE * most, look, level)
    metrics, curve = race(
        learning, cell.fleet(seed), strategy, rate=case["rate"], split=split, limits=bounds
    )
    more: dict[str, Any] = {}
    if limits is None:
        # The target is the end of its first rounds, and the late target that of all rounds.
        windows = [window] if "window" in case else WINDOWS
        stop = place_of(curve, most / LONG)
        end = max(end_of(curve, each, stop) for each in windows)
        late = max(end_of(curve, each) for each in windows)
        more = {"limits": {"virtual_s": curve["virtual_s"][-1], "end": end, "late": late}}
    elif split == "valid":
        return {"metrics": metrics | {"scores": scores_of(curve, limits)}}
    return {"metrics": metrics | more, "curve": with_window(curve, window)}
