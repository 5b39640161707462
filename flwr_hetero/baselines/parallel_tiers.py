"""TiFL's tiers in parallel: each trains at its own pace, after FedAT by the same authors."""

import json
from dataclasses import dataclass
from logging import INFO
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count
from flwr_hetero.fedbuff.algorithm import Weights, default_buffer
from flwr_hetero.fedbuff.engine import Arrival
from flwr_hetero.fedbuff.strategy import FedBuff
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.state_dict import StateDict, check_state
from flwr_hetero.tifl.algorithm import change_probs, quantile_tiers, spread_over
from flwr_hetero.tifl.evaluation import accuracy_per_tier
from flwr_hetero.tifl.tiers import Tiers

SMOOTHING = 0.5
"""Weight of the past in a node's latency."""
STATE = {"latency": str, "accuracy": ((-1,), "f"), "credits_left": ((-1,), "f")}
"""What is saved beside FedBuff's state."""


@dataclass
class Cohort:
    """Nodes of a tier that were asked together, and those that are still at work."""

    tier: int
    nodes: set[int]
    at_work: set[int]


class ParallelTiFL(FedBuff):
    r"""Let all tiers of TiFL train at the same time, each at its own pace.

    A tier asks ``clients_per_round`` of its nodes; when all have answered or failed, their
    updates are merged as one buffer of :class:`FedBuff`, and the tier asks again. No tier waits
    for another, and no profiling is needed: all nodes start once, and their replies tell their
    latencies. ``num_rounds`` of ``start`` counts merges.

    Parameters
    ----------
    strategy : Strategy, optional
        What merges the updates: any Flower strategy that derives from FedAvg, or a wrapper such
        as ``LocalSteps(budget="slice")``; FedAvg if left out.
    clients_per_round : int
        Nodes |C| of a tier that are at work at the same time.
    num_tiers : int
        Tiers wanted, of equal size; fewer result if there are fewer different latencies.
    credits : int, optional
        How often each tier may begin until all are refilled; None: without limit.
    accuracy_key : str, optional
        Metric of the evaluation replies of which more is better. None: the first with "acc" in
        its name, else minus the first with "loss" in its name.
    staleness, weighting, max_weight, seed
        As for :class:`FedBuff`.

    Raises
    ------
    ValueError
        If a setting is out of range, or for the reasons of :class:`FedBuff`.

    Notes
    -----
    FedAT keeps a model per tier; here a tier's *updates* are added to the present model, so that
    none is replaced by an old one. Each counts as in a merge of half of the nodes at work,
    FedBuff's default: whole steps for a single tier made training noisy. Where nodes evaluate, a
    tier's weight is its probability by TiFL's ChangeProbs over the tiers' accuracies, in means:
    tiers of low accuracy count more. There are no "paced" credits, for a tier's pace is its own.
    With whole epochs the updates of the slowest tiers come so rarely that ``max_weight`` cuts
    them.

    No gain over ``FedBuff(LocalSteps(budget="slice"))`` has been seen in first runs; no benchmark
    compares them yet.

    References
    ----------
    Chai et al., "FedAT: A High-Performance and Communication-Efficient Federated Learning System
    with Asynchronous Tiers", SC 2021.

    Examples
    --------
    >>> from flwr_hetero.strategy import LocalSteps
    >>> strategy = ParallelTiFL(LocalSteps(fast_steps=20, budget="slice"), clients_per_round=3)
    """

    name: ClassVar[str] = "tifl"

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        num_tiers: int = 5,
        *,
        credits: int | None = None,
        accuracy_key: str | None = None,
        staleness: str | float = "sqrt",
        weighting: str = "fair",
        max_weight: float = 4.0,
        seed: int = 0,
    ) -> None:
        self.num_selected = check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = check_count("num_tiers", num_tiers, 1)
        self.credits = None if credits is None else check_count("credits", credits, 1)
        self.accuracy_key = accuracy_key
        shared: dict[str, Any] = {"staleness": staleness, "weighting": weighting}
        super().__init__(strategy, **shared, max_weight=max_weight, seed=seed)
        self.latency: dict[str, float] = {}
        self.tiers = Tiers({}, {}, np.zeros(0))
        self.accuracy = np.full(1, np.nan)
        self.credits_left = spread_over(1, self.credits)
        self._open: list[Cohort] = []
        self._new: set[int] = set()  # nodes at work of which nothing is known
        self._drawn: dict[int, int | None] = {}
        self._seen: set[str] = set()
        self._tier: int | None = None
        self._moved = False

    # --- cohorts ------------------------------------------------------------------------

    def next_nodes(self, idle: list[int], at_work: int, buffer: list[Arrival]) -> list[int]:
        """Start nodes that are new, and draw a cohort of each tier that has none."""
        held, free = self._held(), dict[int, list[int]]()
        self._drawn = {}
        for node in (node for node in idle if node not in held):
            tier = self.tiers.tier.get(self.identity(node))
            if tier is None:
                self._drawn[node] = None
            else:
                free.setdefault(tier, []).append(node)
        for tier in self._may_begin(set(free)):
            count = min(self.num_selected, len(free[tier]))
            chosen = self.rng.choice(len(free[tier]), count, replace=False).tolist()
            self._drawn |= {free[tier][i]: tier for i in chosen}
        self._starting = [node for node in idle if node in self._drawn]
        return self._starting

    def _may_begin(self, free: set[int]) -> list[int]:
        """Return the tiers with idle nodes, no cohort and credits; refill if none has any."""
        begun = {cohort.tier for cohort in self._open}
        if free and not any(self.credits_left[tier] > 0 for tier in free | begun):
            self.credits_left += self.credits or 0
        return [tier for tier in sorted(free - begun) if self.credits_left[tier] > 0]

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Open the cohorts of the nodes that are asked; each costs its tier a credit."""
        asked: dict[int | None, set[int]] = {}
        for message in messages:
            node_id = message.metadata.dst_node_id
            asked.setdefault(self._drawn.get(node_id), set()).add(node_id)
        self._new |= asked.pop(None, set())
        for tier, nodes in asked.items():
            if tier is not None:
                self._open.append(Cohort(tier, nodes, set(nodes)))
                self.credits_left[tier] -= 1
        return super().on_instructions(server_round, messages, grid)

    def failed(self, node_id: int) -> None:
        """Wait no longer for a node."""
        self._new.discard(node_id)
        for cohort in self._open:
            cohort.at_work.discard(node_id)

    def due(self, buffer: list[Arrival], team: int) -> list[Arrival]:
        """Return the replies of a cohort of which none is at work; those of new nodes go along."""
        self._learn(buffer)
        for cohort in [cohort for cohort in self._open if not cohort.at_work]:
            self._open.remove(cohort)
            if any(arrival.sent.node_id in cohort.nodes for arrival in buffer):
                self._tier, held = cohort.tier, self._held()
                return [arrival for arrival in buffer if arrival.sent.node_id not in held]
            self.credits_left[cohort.tier] += 1
        self._tier, held = None, self._held()
        new = [arrival for arrival in buffer if arrival.sent.node_id not in held]
        return new if len(new) >= self.num_selected or not self._new else []

    def _held(self) -> set[int]:
        return {node for cohort in self._open for node in cohort.nodes}

    # --- tiers --------------------------------------------------------------------------

    def _learn(self, buffer: list[Arrival]) -> None:
        """Learn the latencies of what has arrived, and form the tiers again."""
        ids = [arrival.sent.instruction.metadata.message_id for arrival in buffer]
        fresh = [arrival for i, arrival in zip(ids, buffer, strict=True) if i not in self._seen]
        self._seen = set(ids)
        for arrival in fresh:
            self.failed(arrival.sent.node_id)  # it is at work no longer
            found = self.session.latency_of(arrival.reply)
            latency_s = found.seconds if found else arrival.arrived_s - arrival.sent.sent_s
            name = self.identity(arrival.sent.node_id)
            before_s = self.latency.get(name, latency_s)
            self.latency[name] = latency_s + SMOOTHING * (before_s - latency_s)
        if fresh:
            self._form_tiers()

    def _form_tiers(self) -> None:
        """Cut the nodes into tiers; those at work for the first time keep places among the slow."""
        known = list(self.latency.values())
        later = [max(known) + 1 + i for i in range(len(self._new))]
        found = quantile_tiers(np.array(known + later), self.num_tiers)
        tier = dict(zip(self.latency, found.tier.tolist(), strict=False))
        tiers = Tiers(dict(self.latency), tier, found.boundaries)
        self._moved |= tiers.moved(self.tiers)
        self.tiers, last = tiers, found.num_tiers - 1
        if len(self.accuracy) != found.num_tiers:
            self.accuracy = np.full(found.num_tiers, np.nan)
            self.credits_left = spread_over(found.num_tiers, self.credits)
            for cohort in self._open:
                cohort.tier = min(cohort.tier, last)

    def on_evaluate_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn the tiers' accuracies."""
        names = [self.identity(reply.metadata.src_node_id) for reply in replies]
        metrics = [next(iter(reply.content.metric_records.values())) for reply in replies]
        reported = dict(zip(names, metrics, strict=True))
        weight_key = getattr(self.leaf, "weighted_by_key", "num-examples")
        found = accuracy_per_tier(reported, self.tiers, self.accuracy_key, weight_key)
        if len(found) == len(self.accuracy):
            self.accuracy = np.where(np.isnan(found), self.accuracy, found)
        return super().on_evaluate_replies(server_round, replies)

    # --- weights ------------------------------------------------------------------------

    def _weigh(self, replies: list[Message], *more: Any) -> Weights:
        """Step by the tier's accuracy, and as far as each update would go in FedBuff's merge."""
        found, tier = super()._weigh(replies, *more), self.tiers.tier
        names = [self.identity(reply.metadata.src_node_id) for reply in replies]
        factors = len(self.accuracy) * change_probs(self.accuracy)
        factor = float(np.mean([factors[tier[name]] for name in names]))
        at_work = sum(min(self.num_selected, len(members)) for members in self.tiers.members)
        size = default_buffer(at_work)
        return found._replace(step=found.step * factor * min(1.0, len(replies) / size))

    # --- history and state ----------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the latencies belong to."""
        if self.latency:
            identify_nodes(self, run.grid, run.timeout_s, run.round + 1)

    def round_info(self) -> dict[str, Any]:
        """Return the merge with its tier, accuracies and credits; new tiers in full."""
        info = super().round_info() | {"tier": self._tier}
        info["tier_accuracy"] = [None if np.isnan(a) else a for a in self.accuracy.tolist()]
        if self.credits is not None:
            info["credits"] = self.credits_left.tolist()
        if self._moved:
            info |= self.tiers.info()
            self._moved = False
        return info

    def state_dict(self) -> StateDict:
        """Return latencies, accuracies and credits, and what FedBuff keeps."""
        credits = self.credits_left.copy()
        for cohort in self._open:  # they begin again
            credits[cohort.tier] += 1
        own = {"accuracy": self.accuracy, "credits_left": credits}
        return super().state_dict() | own | {"latency": json.dumps(self.latency)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, STATE, "ParallelTiFL")
        super().load_state_dict(state)
        self.latency = json.loads(str(state["latency"]))
        self.accuracy = np.array(state["accuracy"])
        self.credits_left = np.array(state["credits_left"])
        if self.latency:
            self._form_tiers()

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        text = "\t├──> ParallelTiFL: %d nodes of each of %d tiers, credits %s"
        log(INFO, text, self.num_selected, self.num_tiers, self.credits)
        super().summary()
