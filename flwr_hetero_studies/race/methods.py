"""The methods of the race: how each is made, and which two settings of its own are tuned."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from flwr_hetero import strategy as ours
from flwr_hetero_studies import rivals

ALL = 20
"""Nodes of the fleet in most cells."""
RATES = (0.1, 0.05, 0.2)
"""Learning rates to be tried, the one to begin with first."""
MORE, MOST = (*RATES, 0.07, 0.15), (*RATES, 0.025, 0.4, 0.07, 0.15)
"""For methods with one setting of their own, and with none."""
OWN_AVERAGE = 32
"""Where the average of a method that has one stands among those that are measured."""
BASE = "FedAvg"
OURS = "FedSlice"
"""What is recommended, at the rate that is tuned for FedAvg: a user changes nothing else."""
COMPOSED, EAGER = "partial work, over-selection", "FedBuff, buffer of 1"
"""What can be made of the package's other parts."""
RINGLEADER, RESCALED, QUICK = "Ringleader ASGD", "Rescaled ASGD", "FedAvg, slowest left out"


class Entrant(NamedTuple):
    """``build`` takes nodes at work, a seed and both settings; values begin with the usual one."""

    build: Callable[..., ours.Wrapper]
    first: Sequence[Any] = (None,)
    second: Sequence[Any] = (None,)
    rates: Sequence[float] = RATES
    named: tuple[str, str] = ("", "")
    selects: bool = False
    """Whether it says nothing new where all nodes are at work: there is nothing to select."""

    def runs_with(self, count: int, nodes: int) -> bool:
        return count < nodes or not self.selects


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def fedprox(mu: float) -> FedProx:
    return FedProx(fraction_evaluate=0.0, proximal_mu=mu)


def some(strategy: Strategy, count: int, seed: int) -> ours.Wrapper:
    return ours.RandomSelection(strategy, count, seed=seed)


class FreeNodes(ours.RandomSelection):
    """Draw as many nodes as may train beside those that still train for an earlier round."""

    def select(self, context: Any, grid: Any, online: Any) -> list[int]:
        over: Any = self.outer
        count = max(1, (self.clients_per_round or 1) - over.round_info()["in_flight"])
        over.wanted = max(1, round(over.share * count))
        return self.rng.sample(sorted(online), min(count, len(online)))


class OverSelectFree(ours.OverSelect):
    """Over-selection in which nodes that are no longer waited for still occupy their places."""

    def __init__(self, strategy: Strategy, count: int, seed: int, share: float) -> None:
        super().__init__(FreeNodes(strategy, count, seed=seed), count)
        self.share = share
        # the replies to wait for in this round
        self.wanted = count

    def on_instructions(self, context: Any, messages: Any, grid: Any) -> Any:
        context.enough = self.wanted
        return messages


def over_select(count: int, seed: int, share: float, _: None) -> ours.Wrapper:
    return OverSelectFree(fedavg(), count, seed, share)


def composed(count: int, seed: int, steps: int, share: float) -> ours.Wrapper:
    """Over-selection of nodes that do what fits the time of so many steps of a quick one."""
    inner = ours.LocalSteps(fedavg(), steps, budget="deadline", step_correction=0.0)
    return OverSelectFree(inner, count, seed, share)


def tifl(count: int, seed: int, policy: str, tiers: int) -> ours.Wrapper:
    """TiFL; its first round asks all nodes, so with fewer at work they are timed in a phase."""
    how: dict[str, Any] = {"policy": policy, "seed": seed}
    if count < ALL:
        how |= {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}
    return ours.TiFL(fedavg(), min(count, ALL // tiers), tiers, **how)


def partial_work(count: int, seed: int, mu: float, steps: int) -> ours.Wrapper:
    """FedProx with what fits a deadline: the time of so many steps of a quick node."""
    inner = ours.LocalSteps(fedprox(mu), steps, budget="deadline", step_correction=0.0)
    return some(inner, count, seed)


def biased(count: int, seed: int, steps: int, fraction: float) -> ours.Wrapper:
    how: dict[str, Any] = {"budget": "two-class", "weigh_by_steps": True}
    how |= {"high_loss_fraction": fraction}
    return some(ours.BiasedLocalSGD(fedavg(), steps, **how), count, seed)


def fedbuff(count: int, seed: int, share: float, staleness: float) -> ours.Wrapper:
    """FedBuff as published: whole epochs, all updates alike; a buffer of a share of the nodes."""
    how: dict[str, Any] = {"weighting": "equal", "staleness": staleness, "seed": seed}
    size = max(1, round(share * count))
    strategy = ours.FedBuff(fedavg(), concurrency=count, buffer_size=size, **how)
    strategy.node_limit = None
    return strategy


def eager(count: int, seed: int, staleness: float, _: None) -> ours.Wrapper:
    """FedBuff with every update at once, all alike, and its limit on each node's share."""
    how: dict[str, Any] = {"weighting": "equal", "staleness": staleness, "seed": seed}
    return ours.FedBuff(fedavg(), concurrency=count, buffer_size=1, **how)


def fedat(count: int, seed: int, tiers: int, mu: float) -> ours.Wrapper:
    # as many nodes of each tier as may be at work in all
    tiers = min(tiers, count)
    return rivals.FedAT(fedprox(mu), count // tiers, tiers, seed=seed)


METHODS: dict[str, Entrant] = {
    BASE: Entrant(lambda c, seed, *_: some(fedavg(), c, seed), rates=MOST),
    "FedProx, partial work": Entrant(
        partial_work, (0.01, 0.1, 1.0), (20, 10, 40), named=("mu", "steps of a quick node")),
    "FedNova, partial work": Entrant(
        lambda c, seed, steps, budget: some(ours.FedNova(fedavg(), steps, budget=budget), c, seed),
        (20, 10, 40), ("deadline", "two-class"), (*RATES, 0.4),
        ("steps of a quick node", "budget")),
    "over-selection": Entrant(over_select, (0.6, 0.4, 0.8), rates=MORE, named=("waited for", "")),
    "TiFL": Entrant(tifl, ("adaptive", "paced", "uniform"), (5, 4, 3), named=("policy", "tiers")),
    "Oort": Entrant(
        lambda c, seed, pace, penalty: rivals.Oort(
            fedavg(), c, pace=pace, penalty=penalty, profiling=True, seed=seed),
        (0.3, 0.6, 0.9), (2.0, 1.0, 0.5), named=("pace", "penalty"), selects=True),
    "Power-of-Choice": Entrant(
        lambda c, seed, factor, _: rivals.PowerOfChoice(
            fedavg(), c, max(c, round(factor * c)), seed=seed),
        (2.0, 1.5, 3.0), rates=MORE, named=("candidates", ""), selects=True),
    "FedCS": Entrant(
        lambda c, seed, s, _: rivals.DeadlineSelection(fedavg(), c, deadline_s=s, seed=seed),
        (None, 4.0, 12.0), rates=MORE, named=("deadline in s", ""), selects=True),
    "AdaComm": Entrant(
        lambda c, seed, steps, s: some(rivals.AdaComm(fedavg(), steps, interval_s=s), c, seed),
        (20, 10, 40), (60.0, 15.0, 200.0), named=("first steps", "interval in s")),
    "biased local SGD": Entrant(
        biased, (20, 10, 40), (0.5, 0.25, 1.0), named=("steps of a fast node", "high-loss share")),
    "FedBuff, published": Entrant(
        fedbuff, (0.5, 0.25, 1.0), (0.5, 0.0, 1.0), named=("buffer", "staleness exponent")),
    "FedAsync": Entrant(
        lambda c, seed, mixing, staleness: rivals.FedAsync(
            fedavg(), mixing=mixing, concurrency=c, staleness=staleness, seed=seed),
        (0.6, 0.3, 0.9), (0.5, 0.0, 1.0), named=("mixing", "staleness exponent")),
    "FedAT": Entrant(fedat, (5, 2, 3), (0.01, 0.1, 0.4), named=("tiers", "mu")),
    # its slack says nothing where times do not vary: bounds are tuned
    "FedCompass": Entrant(
        lambda c, seed, steps, ratio: rivals.FedCompass(
            fedavg(), max(1, steps // ratio), steps, concurrency=c, seed=seed),
        (20, 10, 40), (5, 2, 20), named=("most steps", "over the least")),
    COMPOSED: Entrant(
        composed, (20, 10, 40), (0.8, 0.6, 0.4), named=("steps of a quick node", "waited for")),
    EAGER: Entrant(eager, (0.5, 0.0, 1.0), rates=MORE, named=("staleness exponent", "")),
    RINGLEADER: Entrant(
        lambda c, seed, steps, rate: rivals.RingleaderASGD(
            fedavg(), num_steps=steps, server_rate=rate, concurrency=c, seed=seed),
        (5, 10, 2), (2.0, 1.0, 4.0), named=("steps", "server's rate")),
    RESCALED: Entrant(
        lambda c, seed, steps, rate: rivals.RescaledASGD(
            fedavg(), num_steps=steps, server_rate=rate, concurrency=c, seed=seed),
        (None, 10, 5), (0.25, 0.5, 0.1), named=("steps", "server's rate")),
    QUICK: Entrant(
        lambda c, seed, left_out, _: rivals.WithoutSlowest(
            fedavg(), c, left_out=left_out, seed=seed),
        (0.2, 0.4, 0.6), rates=MORE, named=("left out", "")),
    # with its own constants, and nothing tuned
    OURS: Entrant(lambda c, seed, *_: ours.FedSlice(fedavg(), concurrency=c, seed=seed)),
}  # fmt: skip
