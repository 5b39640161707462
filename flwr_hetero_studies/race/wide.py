"""Fleets, optimisers and networks at which FedSlice had lost, and rivals of the package's parts.

The plan stands on the page, ``page.template``, and was written before its runs.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies import rivals
from flwr_hetero_studies.core import record
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race import limit
from flwr_hetero_studies.race.cells import MAIN, TEXTS, RaceCell, mild, paper_5
from flwr_hetero_studies.race.methods import (
    BASE,
    COMPOSED,
    EAGER,
    OURS,
    OWN_AVERAGE,
    QUICK,
    RESCALED,
    RINGLEADER,
    OverSelectFree,
    fedavg,
    some,
)
from flwr_hetero_studies.race.node import NORMED, Learning
from flwr_hetero_studies.race.tuning import DEVELOPMENT, LEVELS, YARDSTICK, scores_of
from flwr_hetero_studies.race.watch import (
    BATCH_SIZE,
    SMOOTHED,
    WINDOWS,
    Limits,
    race,
)

RUNS, TUNING = "wide: ", "wide tuning: "
AT_WORK, LONG, A_ROUND = 5, 3, 810
"""Nodes at work; how many times as long as to its target FedAvg trains; examples of its round."""
TUNED_SHARE, MOST_RATES = 2 / 3, 4
POOLED = "SGD on the pooled data"
BETWEEN = 19
"""Steps between two models of the average of pooled SGD."""
Base = Callable[[], FedAvg]


def two_kinds(seed: int) -> list[DeviceProfile]:
    # the fastest kind first, as in the named fleets
    return [DeviceProfile(4.0)] * 6 + [DeviceProfile(0.5)] * 14


def phones(seed: int) -> list[DeviceProfile]:
    """Phones that were seen in the wild, the median one as quick as the reference device."""
    found = json.loads((Path(__file__).parent / "phones.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng([seed, 11])
    scores = rng.choice(found["score"], 20) / np.median(found["score"])
    links = rng.integers(len(found["down_kBps"]), size=20).tolist()
    down, up = ([found[f"{way}_kBps"][link] * 8e-3 for link in links] for way in ("down", "up"))
    each = zip(scores.tolist(), up, down, strict=True)
    return [DeviceProfile(speed, uplink_mbps=u, downlink_mbps=d) for speed, u, d in each]


def adam_base() -> FedAvg:
    return FedAdam(fraction_evaluate=0.0, eta=0.01, tau=1e-3)


def momentum_base() -> FedAvg:
    return FedAvgM(fraction_evaluate=0.0, server_learning_rate=1.0, server_momentum=0.9)


class Wide(NamedTuple):
    """A cell: the race's, what it changes in the nodes' optimizer and in the strategy."""

    cell: RaceCell
    base: Base = fedavg
    optimizer: str = "sgd"
    rates: tuple[float, float, float] = (0.1, 0.05, 0.2)
    """Tried first; doubled or halved while the best one is at an end."""
    rivals: tuple[str, ...] = ()
    """Empty: all."""
    rounds: int = 40


ADDED = RINGLEADER, RESCALED, QUICK
TWO, THREE = (COMPOSED, EAGER, *ADDED), (COMPOSED, EAGER, "FedCompass", *ADDED)
"""Rivals beside the main cell: products of the package's parts, FedCompass, and later ones."""
SLOW_START, QUICK_START = paper_5(wait_s=3.8, start_s=2.2), paper_5(wait_s=0.6, start_s=0.4)
UNRELIABLE = paper_5(jitter=0.3, availability=0.8)
ADAM_RATES, MOMENTUM_RATES = (0.001, 0.0005, 0.002), (0.01, 0.005, 0.02)
TEXT_RATES = (1.0, 0.5, 2.0)
WIDE: dict[str, Wide] = {
    "two kinds": Wide(RaceCell(two_kinds), rivals=THREE),
    "main": Wide(RaceCell(paper_5())),
    "momentum": Wide(RaceCell(paper_5()), fedavg, "momentum", MOMENTUM_RATES, TWO),
    "FedAvgM": Wide(RaceCell(paper_5()), momentum_base, rivals=TWO),
    "FedAdam": Wide(RaceCell(paper_5()), adam_base, rivals=TWO),
    "Adam": Wide(RaceCell(paper_5()), fedavg, "adam", ADAM_RATES, TWO),
    "phones": Wide(RaceCell(phones), rivals=TWO),
    "6 s a message": Wide(RaceCell(SLOW_START), rivals=TWO),
    "CNN": Wide(
        RaceCell(paper_5(), model=NORMED, rows=(3000, 1000, 2000)), rivals=TWO, rounds=20),
    "1 s a message": Wide(RaceCell(QUICK_START), rivals=TWO),
    "mild": Wide(RaceCell(mild), rivals=TWO),
    "unreliable": Wide(RaceCell(UNRELIABLE), rivals=TWO),
    "two kinds, momentum": Wide(
        RaceCell(two_kinds), fedavg, "momentum", MOMENTUM_RATES, TWO),
    "texts": Wide(
        RaceCell(paper_5(), MAIN, "stdlib", "bag", rows=TEXTS), rates=TEXT_RATES, rivals=TWO),
}  # fmt: skip


# --- methods: their own settings as tuned in the main cell, only rates are tuned ---------------


def steps_in(base: Base, steps: int = 20) -> ours.Wrapper:
    return ours.LocalSteps(base(), steps, budget="deadline", step_correction=0.0)


def proximal() -> FedAvg:
    return FedProx(fraction_evaluate=0.0, proximal_mu=0.1)


def partial_work(base: Base, seed: int) -> ours.Wrapper:
    return some(steps_in(proximal if base is fedavg else base), AT_WORK, seed)


def fedbuff(size: int, base: Base, seed: int) -> ours.Wrapper:
    how: dict[str, Any] = {"weighting": "equal", "seed": seed}
    return ours.FedBuff(base(), concurrency=AT_WORK, buffer_size=size, **how)


def damped() -> FedAvg:
    """FedBuff's server momentum: .9, at the rate at which it moves no further in all."""
    return FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.1, server_momentum=0.9)


def compass(base: Base, seed: int) -> ours.Wrapper:
    return rivals.FedCompass(base(), 1, 10, concurrency=AT_WORK, seed=seed)


def ringleader(base: Base, seed: int) -> ours.Wrapper:
    how: dict[str, Any] = {"num_steps": 5, "server_rate": 2.0}
    return rivals.RingleaderASGD(base(), **how, concurrency=AT_WORK, seed=seed)


def rescaled(base: Base, seed: int) -> ours.Wrapper:
    how: dict[str, Any] = {"num_steps": None, "server_rate": 0.25}
    return rivals.RescaledASGD(base(), **how, concurrency=AT_WORK, seed=seed)


def slices(base: Base, seed: int) -> ours.Wrapper:
    return ours.FedSlice(base(), concurrency=AT_WORK, seed=seed)


METHODS: dict[str, Callable[[Base, int], ours.Wrapper]] = {
    BASE: lambda base, seed: some(base(), AT_WORK, seed),
    OURS: slices,
    COMPOSED: lambda base, seed: OverSelectFree(steps_in(base), AT_WORK, seed, 0.8),
    "FedCompass": compass,
    EAGER: lambda base, seed: fedbuff(1, base, seed),
    "FedProx, partial work": partial_work,
    "over-selection": lambda base, seed: OverSelectFree(base(), AT_WORK, seed, 0.6),
    "FedBuff, server momentum": lambda base, seed: fedbuff(1, damped, seed),
    RINGLEADER: ringleader,
    RESCALED: rescaled,
    QUICK: lambda base, seed: rivals.WithoutSlowest(base(), AT_WORK, left_out=0.2, seed=seed),
}


# --- the plan -------------------------------------------------------------------------------------


def case_of(kind: str, cell: str, name: str, rate: float, **more: Any) -> Case:
    case = {"experiment": f"{kind}{cell}", "name": name, "cell": cell, "rate": rate}
    return case | {"rounds": WIDE[cell].rounds, **more}


def next_rates(first: Sequence[float], scores: Mapping[float, float]) -> list[float]:
    """Return the rates to try next, by scores so far, less is better: none when all is known.

    >>> next_rates((0.1, 0.05, 0.2), {0.1: 3.0, 0.05: 2.0, 0.2: 4.0})
    [0.025]
    """
    if todo := [rate for rate in first if rate not in scores]:
        return todo
    best = min(scores, key=lambda rate: scores[rate])
    if len(scores) >= MOST_RATES:
        return []
    if best == min(scores):
        return [best / 2]
    return [best * 2] if best == max(scores) else []


@dataclass(frozen=True)
class Tuned:
    """What the lines so far say of a cell's rates."""

    lines: Sequence[Line]
    cell: str

    def scores(self, name: str) -> dict[float, dict[int, float]]:
        own = record.of(self.lines, experiment=TUNING + self.cell, name=name)
        return {
            line["case"]["rate"]: {w: line["metrics"]["scores"][str(w)] for w in WINDOWS}
            for line in own
        }

    def best(self, name: str) -> tuple[float, int] | None:
        """Return the rate and the models averaged; None while there are rates to try."""
        found = self.scores(name)
        if next_rates(WIDE[self.cell].rates, {r: min(s.values()) for r, s in found.items()}):
            return None
        rate = min(found, key=lambda each: min(found[each].values()))
        return rate, min(found[rate], key=lambda window: found[rate][window])

    def todo(self, name: str) -> list[float]:
        scores = {rate: min(s.values()) for rate, s in self.scores(name).items()}
        return next_rates(WIDE[self.cell].rates, scores)


def names_in(cell: str) -> list[str]:
    found = WIDE[cell].rivals or [n for n in METHODS if n not in (BASE, OURS)]
    return [BASE, OURS, *found]


def plan(options: Options, lines: Sequence[Line]) -> Iterator[Trial]:
    """Plan cell by cell: FedAvg's long run, everybody's rates, then the runs that are reported."""
    for cell, wide in WIDE.items():
        if wide.cell.data != options.data:
            continue
        tuned, (seed, *_) = Tuned(lines, cell), DEVELOPMENT
        case = case_of(TUNING, cell, YARDSTICK, wide.rates[0])
        yield Trial(case, seed, {"split": "valid"})
        if not (yard := record.of(lines, **case)):
            continue
        given = {"split": "valid", "limits": yard[0]["metrics"]["limits"]}
        for name in (name for name in names_in(cell) if name != OURS):
            for rate in tuned.todo(name):
                yield Trial(case_of(TUNING, cell, name, rate), seed, given)
        yield from reported(options, tuned)


def reported(options: Options, tuned: Tuned) -> Iterator[Trial]:
    base = tuned.best(BASE)
    if base is None:
        return
    yard = case_of(RUNS, tuned.cell, YARDSTICK, base[0], window=base[1])
    known = record.by_seed(record.of(tuned.lines, **yard))
    seeds = options.seeds_or(range(WIDE[tuned.cell].cell.seeds))
    yield from (Trial(yard, seed, {"split": "test"}) for seed in seeds)
    more = [POOLED] if tuned.cell == "main" else []
    for name in (*names_in(tuned.cell), *more):
        given = {OURS: (base[0], OWN_AVERAGE), POOLED: base}
        best = given.get(name) or tuned.best(name)
        if best is None:
            continue
        case = case_of(RUNS, tuned.cell, name, best[0], window=best[1])
        for seed in (seed for seed in seeds if seed in known):
            yield Trial(case, seed, {"split": "test", "limits": known[seed]["metrics"]["limits"]})


def run(case: Case, seed: int, data: Data, split: str, **given: Any) -> dict[str, Any]:
    wide, is_yard = WIDE[case["cell"]], case["name"] == YARDSTICK
    cell, limits = wide.cell, given.get("limits", {})
    train, valid, test = cell.rows
    dataset, shape = data.first(train + valid, test), (cell.model, cell.partition, cell.nodes)
    learning = Learning(dataset, *shape, cell.rows, seed, wide.optimizer)
    per_round = A_ROUND * train * 20 / (6000 * cell.nodes)
    most = LONG * case["rounds"] * per_round
    if case["name"] == POOLED:
        # In batches as the nodes have: the limit in examples.
        how = most / LONG, 1.5 * per_round, case["window"], BETWEEN * BATCH_SIZE
        return limit.pooled(learning, BATCH_SIZE, case["rate"], split, *how)
    # FedAvg with three nodes a round
    strategy = some(wide.base(), 3, seed) if is_yard else METHODS[case["name"]](wide.base, seed)
    if is_yard:
        bounds = Limits(inf, most, 1.5 * per_round)
    elif split == "test":
        bounds = Limits(limits["virtual_s"], most, 1.5 * per_round)
    else:
        # what comes after the last level says nothing of a rate
        part, level = TUNED_SHARE, limits["end"] + LEVELS[-1]
        bounds = Limits(part * limits["virtual_s"], part * most, 1.5 * per_round, level)
    found = race(
        learning, cell.fleet(seed), strategy, rate=case["rate"], split=split, limits=bounds
    )
    curve, metrics = found["curve"], found["metrics"]
    if is_yard:
        # of its first rounds, and of all of them: the late target
        windows = [case["window"]] if "window" in case else WINDOWS
        short = int(np.searchsorted(curve["examples"], most / LONG))
        end, late = (
            max(float(np.mean(curve[f"all/{w}"][max(0, stop - SMOOTHED) : stop])) for w in windows)
            for stop in (short, len(curve["examples"]))
        )
        metrics |= {"limits": {"virtual_s": curve["virtual_s"][-1], "end": end, "late": late}}
    elif split == "valid":
        return {"metrics": metrics | {"scores": scores_of(curve, limits)}}
    kept = {key: curve[key] for key in ("virtual_s", "examples", "bytes", "device_s")}
    kept |= {k: curve[f"{k}/{case.get('window', 1)}"] for k in ("all", "slow")}
    return {"metrics": metrics, "curve": kept}
