"""The methods of the race: how each is built, and which two settings of its own are tuned."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from flwr_hetero import strategy as ours
from flwr_hetero_studies import rivals

ALL = 20
"""Nodes of the fleet in most cells."""
RATES = (0.1, 0.05, 0.2)
"""Learning rates to try, the usual one first."""
MORE_RATES = (*RATES, 0.07, 0.15)
"""For methods with one setting of their own, so that all have the same number of trials."""
MOST_RATES = (*RATES, 0.025, 0.4, 0.07, 0.15)
"""For methods without a setting of their own."""
OWN_AVERAGE = 32
"""Stands for a method's own average of models, where it has one."""
BASE = "FedAvg"
OURS = "FedSlice"
"""What is recommended, at the rate that is tuned for FedAvg: a user changes nothing else."""
COMPOSED = "partial work, over-selection"
EAGER = "FedBuff, buffer of 1"
RINGLEADER = "Ringleader ASGD"
RESCALED = "Rescaled ASGD"
QUICK = "FedAvg, slowest left out"
Base = Callable[[], FedAvg]
"""Makes the strategy of Flower that a method is put around."""


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def fedprox(mu: float) -> FedProx:
    return FedProx(fraction_evaluate=0.0, proximal_mu=mu)


class Entrant(NamedTuple):
    """A method, with the values to try for each of its two settings, the usual one first."""

    make: Callable[..., ours.Wrapper]
    """Takes the base, the number of nodes at work, a seed and both settings."""
    first: Sequence[Any] = (None,)
    second: Sequence[Any] = (None,)
    rates: Sequence[float] = RATES
    selects: bool = False
    """Whether it only selects nodes, and so is plain FedAvg where all nodes are at work."""
    one_more: bool = False
    """Whether to try one more rate if the best one is the lowest or the highest."""

    def runs_with(self, count: int, nodes: int) -> bool:
        return count < nodes or not self.selects


def draw(strategy: Strategy, count: int, seed: int) -> ours.Wrapper:
    return ours.RandomSelection(strategy, count, seed=seed)


class FreeNodes(ours.RandomSelection):
    """Draw as many nodes as may train beside those that still train for an earlier round."""

    def select(self, context: Any, grid: Any, online: Any) -> list[int]:
        over: Any = self.outer
        count = max(1, (self.clients_per_round or 1) - over.round_info()["in_flight"])
        over.wanted = max(1, round(over.share * count))
        return self.rng.sample(sorted(online), min(count, len(online)))


class OverSelectFree(rivals.OverSelect):
    """Over-selection in which nodes that are no longer waited for still occupy their places."""

    def __init__(self, strategy: Strategy, count: int, seed: int, share: float) -> None:
        super().__init__(FreeNodes(strategy, count, seed=seed), count)
        self.share = share
        # The number of replies to wait for in this round.
        self.wanted = count

    def on_instructions(self, context: Any, messages: Any, grid: Any) -> Any:
        context.enough = self.wanted
        return messages


def deadline_steps(strategy: Strategy, steps: int) -> ours.Wrapper:
    """Let each node take the steps that fit the time of so many steps of a quick node."""
    return ours.LocalSteps(strategy, steps, budget="deadline", step_correction=0.0)


def composed(base: Base, count: int, seed: int, steps: int, share: float) -> ours.Wrapper:
    return OverSelectFree(deadline_steps(base(), steps), count, seed, share)


def tifl(base: Base, count: int, seed: int, policy: str, tiers: int) -> ours.Wrapper:
    """Build TiFL. Its first round asks all nodes, so with fewer at work a phase times them."""
    settings: dict[str, Any] = {"policy": policy, "seed": seed}
    if count < ALL:
        settings |= {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}
    return ours.TiFL(base(), min(count, ALL // tiers), tiers, **settings)


def partial_work(base: Base, count: int, seed: int, mu: float, steps: int) -> ours.Wrapper:
    """Build FedProx with the steps that fit a deadline."""
    return draw(deadline_steps(fedprox(mu), steps), count, seed)


def biased(base: Base, count: int, seed: int, steps: int, fraction: float) -> ours.Wrapper:
    strategy = ours.BiasedLocalSGD(
        base(), steps, budget="two-class", weigh_by_steps=True, high_loss_fraction=fraction
    )
    return draw(strategy, count, seed)


def fedbuff(base: Base, count: int, seed: int, size: int, staleness: float) -> ours.FedBuff:
    """Build FedBuff with updates that all count alike, as in the paper."""
    return ours.FedBuff(
        base(),
        concurrency=count,
        buffer_size=size,
        weighting="equal",
        staleness=staleness,
        seed=seed,
    )


def published(base: Base, count: int, seed: int, share: float, staleness: float) -> ours.Wrapper:
    """Build FedBuff as published: a buffer of a share of the nodes, and no limit on a node."""
    strategy = fedbuff(base, count, seed, max(1, round(share * count)), staleness)
    strategy.node_limit = None
    return strategy


def fedat(base: Base, count: int, seed: int, tiers: int, mu: float) -> ours.Wrapper:
    # As many nodes of each tier as may be at work in all.
    tiers = min(tiers, count)
    return rivals.FedAT(fedprox(mu), count // tiers, tiers, seed=seed)


STEPS = (20, 10, 40)
POWERS = (0.5, 0.0, 1.0)
METHODS: dict[str, Entrant] = {
    BASE: Entrant(lambda base, n, seed, *_: draw(base(), n, seed), rates=MOST_RATES),
    "FedProx, partial work": Entrant(partial_work, (0.01, 0.1, 1.0), STEPS),
    "FedNova, partial work": Entrant(
        lambda base, n, seed, steps, budget: draw(
            rivals.FedNova(base(), steps, budget=budget), n, seed),
        STEPS, ("deadline", "two-class"), (*RATES, 0.4)),
    "over-selection": Entrant(
        lambda base, n, seed, share, _: OverSelectFree(base(), n, seed, share),
        (0.6, 0.4, 0.8), rates=MORE_RATES),
    "TiFL": Entrant(tifl, ("adaptive", "paced", "uniform"), (5, 4, 3)),
    "Oort": Entrant(
        lambda base, n, seed, pace, penalty: rivals.Oort(
            base(), n, pace=pace, penalty=penalty, profiling=True, seed=seed),
        (0.3, 0.6, 0.9), (2.0, 1.0, 0.5), selects=True),
    "Power-of-Choice": Entrant(
        lambda base, n, seed, factor, _: rivals.PowerOfChoice(
            base(), n, max(n, round(factor * n)), seed=seed),
        (2.0, 1.5, 3.0), rates=MORE_RATES, selects=True),
    "FedCS": Entrant(
        lambda base, n, seed, s, _: rivals.DeadlineSelection(base(), n, deadline_s=s, seed=seed),
        (None, 4.0, 12.0), rates=MORE_RATES, selects=True),
    "AdaComm": Entrant(
        lambda base, n, seed, steps, s: draw(rivals.AdaComm(base(), steps, interval_s=s), n, seed),
        STEPS, (60.0, 15.0, 200.0)),
    "biased local SGD": Entrant(biased, STEPS, (0.5, 0.25, 1.0)),
    "FedBuff, published": Entrant(published, (0.5, 0.25, 1.0), POWERS),
    "FedAsync": Entrant(
        lambda base, n, seed, mixing, staleness: rivals.FedAsync(
            base(), mixing=mixing, concurrency=n, staleness=staleness, seed=seed),
        (0.6, 0.3, 0.9), POWERS),
    "FedAT": Entrant(fedat, (5, 2, 3), (0.01, 0.1, 0.4)),
    # Its slack changes nothing where times do not vary, so its bounds are tuned.
    "FedCompass": Entrant(
        lambda base, n, seed, steps, ratio: rivals.FedCompass(
            base(), max(1, steps // ratio), steps, concurrency=n, seed=seed),
        STEPS, (5, 2, 20)),
    COMPOSED: Entrant(composed, STEPS, (0.8, 0.6, 0.4)),
    EAGER: Entrant(
        lambda base, n, seed, staleness, _: fedbuff(base, n, seed, 1, staleness),
        POWERS, rates=MORE_RATES),
    RINGLEADER: Entrant(
        lambda base, n, seed, steps, rate: rivals.RingleaderASGD(
            base(), num_steps=steps, server_rate=rate, concurrency=n, seed=seed),
        (5, 10, 2), (2.0, 1.0, 4.0)),
    RESCALED: Entrant(
        lambda base, n, seed, steps, rate: rivals.RescaledASGD(
            base(), num_steps=steps, server_rate=rate, concurrency=n, seed=seed),
        (None, 10, 5), (0.25, 0.5, 0.1)),
    QUICK: Entrant(
        lambda base, n, seed, left_out, _: rivals.WithoutSlowest(
            base(), n, left_out=left_out, seed=seed),
        (0.2, 0.4, 0.6), rates=MORE_RATES),
    # Nothing of it is tuned: it has its own constants.
    OURS: Entrant(lambda base, n, seed, *_: ours.FedSlice(base(), concurrency=n, seed=seed)),
}  # fmt: skip
