"""The methods of the race: how each is made, and which two settings of its own are tuned."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from flwr_hetero import strategy as face

ALL = 20
"""Nodes of the fleet in most cells."""
RATES = (0.1, 0.05, 0.2)
"""Learning rates to be tried, the one to begin with first."""


OWN_AVERAGE = 32
"""Where the average of a method that has one stands among those that are measured."""


class Method(NamedTuple):
    """``build`` takes nodes at work, both settings and a seed; values begin with the usual one."""

    build: Callable[[int, Any, Any, int], Strategy]
    first: Sequence[Any] = (None,)
    second: Sequence[Any] = (None,)
    rates: Sequence[float] = RATES
    named: tuple[str, str] = ("", "")
    at_work: Callable[[int, int], bool] = lambda count, nodes: True
    """Whether it says anything new with so many of so many nodes at work."""
    window: int | None = None
    """The average to measure by, where the method has its own; None: chosen with the rest."""


def fedavg(**settings: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, **settings)


def some_of(strategy: Strategy, count: int, seed: int) -> Strategy:
    """Train so many nodes a round."""
    return face.RandomSelection(strategy, count, seed=seed)


def partial_work(count: int, mu: float, steps: int, seed: int) -> Strategy:
    """FedProx with what fits a deadline: the time of so many steps of a quick node."""
    inner = FedProx(fraction_evaluate=0.0, proximal_mu=mu)
    return some_of(
        face.LocalSteps(inner, steps, budget="deadline", weighting="examples"), count, seed
    )


def fednova(count: int, steps: int, budget: str, seed: int) -> Strategy:
    return some_of(face.FedNova(fedavg(), steps, budget=budget), count, seed)


class Free(face.RandomSelection):
    """Draw as many nodes as are not still at work on an earlier round, so that no more ever are."""

    over: face.OverSelect
    share: float

    def select(self, context: Any, grid: Any, online: Any) -> list[int]:
        """Draw them, and set how many are waited for."""
        count = max(1, (self.clients_per_round or 1) - self.over.round_info()["still_at_work"])
        self.over.take = max(1, round(self.share * count))
        return self.rng.sample(sorted(online), min(count, len(online)))


def over_select(count: int, share: float, _none: None, seed: int) -> Strategy:
    """Over-selection with no more nodes at work than are allowed, those not waited for included."""
    selection = Free(fedavg(), count, seed=seed)
    over = face.OverSelect(selection, count)
    selection.over, selection.share = over, share
    return over


def oort(count: int, pace: float, penalty: float, seed: int) -> Strategy:
    how: dict[str, Any] = {"profiling": True, "seed": seed}
    return face.Oort(fedavg(), count, pace=pace, penalty=penalty, **how)


def power_of_choice(count: int, factor: float, _none: None, seed: int) -> Strategy:
    return face.PowerOfChoice(fedavg(), count, max(count, round(factor * count)), seed=seed)


def fedcs(count: int, deadline_s: float | None, _none: None, seed: int) -> Strategy:
    return face.DeadlineSelection(fedavg(), count, deadline_s=deadline_s, seed=seed)


def tifl(count: int, policy: str, tiers: int, seed: int) -> Strategy:
    """TiFL; its first round asks all nodes, so with fewer at work they are timed in a phase."""
    how: dict[str, Any] = {"policy": policy, "seed": seed}
    if count < ALL:
        how |= {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}
    return face.TiFL(fedavg(), min(count, ALL // tiers), tiers, **how)


def adacomm(count: int, steps: int, interval_s: float, seed: int) -> Strategy:
    return some_of(face.AdaComm(fedavg(), steps, interval_s=interval_s), count, seed)


def biased(count: int, steps: int, fraction: float, seed: int) -> Strategy:
    how: dict[str, Any] = {"budget": "two-class", "weighting": "steps"}
    inner = face.BiasedLocalSGD(fedavg(), steps, high_loss_fraction=fraction, **how)
    return some_of(inner, count, seed)


def buffer_of(count: int, share: float) -> int:
    """Return the updates in a merge, as a share of the nodes at work."""
    return max(1, round(share * count))


def fedbuff(count: int, share: float, staleness: float, seed: int) -> Strategy:
    """FedBuff as published: whole epochs, all updates alike."""
    size = buffer_of(count, share)
    how: dict[str, Any] = {"weighting": "equal", "staleness": staleness, "seed": seed}
    return face.FedBuff(fedavg(), concurrency=count, buffer_size=size, **how)


def fedasync(count: int, mixing: float, staleness: float, seed: int) -> Strategy:
    how: dict[str, Any] = {"concurrency": count, "staleness": staleness, "seed": seed}
    return face.FedAsync(fedavg(), mixing=mixing, **how)


def fedat(count: int, tiers: int, mu: float, seed: int) -> Strategy:
    """FedAT, with as many nodes of each tier as may be at work in all."""
    inner = FedProx(fraction_evaluate=0.0, proximal_mu=mu)
    tiers = min(tiers, count)
    return face.FedAT(inner, count // tiers, tiers, seed=seed)


def fedcompass(count: int, steps: int, ratio: int, seed: int) -> Strategy:
    """FedCompass; its slack says nothing where times do not vary, so its bounds are tuned."""
    return face.FedCompass(fedavg(), max(1, steps // ratio), steps, concurrency=count, seed=seed)


def fedslice(**corrections: float) -> Callable[[int, None, None, int], Strategy]:
    """Ours, with its own constants; only the learning rate is tuned."""

    def build(count: int, _first: None, _second: None, seed: int) -> Strategy:
        return face.FedSlice(fedavg(), concurrency=count, seed=seed, **corrections)

    return build


BASE = "FedAvg"
OURS = "FedSlice"
"""The class that is recommended: the only one that is held against the rivals."""
FAIR = "FedSlice, fair"
"""The same with all nodes counting by their examples, whatever their pace and steps."""
OWN = (OURS, FAIR)


def selects(count: int, nodes: int) -> bool:
    """With all nodes at work there is nothing to select."""
    return count < nodes


METHODS: dict[str, Method] = {
    BASE: Method(
        lambda count, _a, _b, seed: some_of(fedavg(), count, seed),
        rates=(*RATES, 0.025, 0.4, 0.07, 0.15),
    ),
    "FedProx, partial work": Method(
        partial_work, (0.01, 0.1, 1.0), (20, 10, 40), named=("mu", "steps of a quick node")
    ),
    "FedNova, partial work": Method(
        fednova, (20, 10, 40), ("deadline", "two-class"), (*RATES, 0.4),
        named=("steps of a quick node", "budget"),
    ),
    "over-selection": Method(
        over_select, (0.6, 0.4, 0.8), rates=(*RATES, 0.07, 0.15), named=("waited for", "")
    ),
    "TiFL": Method(
        tifl, ("adaptive", "paced", "uniform"), (5, 4, 3), named=("policy", "tiers")
    ),
    "Oort": Method(
        oort, (0.3, 0.6, 0.9), (2.0, 1.0, 0.5), named=("pace", "penalty"), at_work=selects
    ),
    "Power-of-Choice": Method(
        power_of_choice, (2.0, 1.5, 3.0), rates=(*RATES, 0.07, 0.15), at_work=selects,
        named=("candidates", ""),
    ),
    "FedCS": Method(
        fedcs, (None, 4.0, 12.0), rates=(*RATES, 0.07, 0.15), at_work=selects,
        named=("deadline in s", ""),
    ),
    "AdaComm": Method(
        adacomm, (20, 10, 40), (60.0, 15.0, 200.0), named=("first steps", "interval in s")
    ),
    "biased local SGD": Method(
        biased, (20, 10, 40), (0.5, 0.25, 1.0), named=("steps of a fast node", "high-loss share")
    ),
    "FedBuff, published": Method(
        fedbuff, (0.5, 0.25, 1.0), (0.5, 0.0, 1.0), named=("buffer", "staleness exponent")
    ),
    "FedAsync": Method(
        fedasync, (0.6, 0.3, 0.9), (0.5, 0.0, 1.0), named=("mixing", "staleness exponent")
    ),
    "FedAT": Method(fedat, (5, 2, 3), (0.01, 0.1, 0.4), named=("tiers", "mu")),
    "FedCompass": Method(
        fedcompass, (20, 10, 40), (5, 2, 20), named=("most steps", "over the least")
    ),
    OURS: Method(fedslice(), rates=(*RATES, 0.025, 0.4, 0.07, 0.15), window=OWN_AVERAGE),
    FAIR: Method(
        fedslice(rate_correction=1.0, step_correction=1.0), window=OWN_AVERAGE,
        rates=(*RATES, 0.025, 0.0125, 0.07, 0.15),
    ),
}  # fmt: skip


def trials_of(
    method: Method, found: dict[tuple[Any, Any, Any], float]
) -> list[tuple[Any, Any, Any]]:
    """Return what is to be tried next: rates, then one setting after the other.

    ``found`` has the score of what was tried, less is better. Empty: nothing is left to try.
    """
    stages: list[Callable[[tuple[Any, Any, Any]], list[tuple[Any, Any, Any]]]] = [
        lambda best: [(rate, best[1], best[2]) for rate in method.rates],
        lambda best: [(best[0], value, best[2]) for value in method.first],
        lambda best: [(best[0], best[1], value) for value in method.second],
    ]
    best = (method.rates[0], method.first[0], method.second[0])
    for stage in stages:
        wanted = stage(best)
        if todo := [trial for trial in wanted if trial not in found]:
            return todo
        best = min(wanted, key=lambda trial: found[trial])
    return []


def best_of(
    method: Method, found: dict[tuple[Any, Any, Any], float]
) -> tuple[Any, Any, Any] | None:
    """Return the best of all trials; None while some are left."""
    return None if trials_of(method, found) else min(found, key=lambda trial: found[trial])
