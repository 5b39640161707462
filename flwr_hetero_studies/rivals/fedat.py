"""FedAT: tiers of about equally fast nodes, which train asynchronously to each other."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.errors import check_count
from flwr_hetero.exchange.aggregate import mean_arrays, why_no_model, with_left_out
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.server.loop import Run
from flwr_hetero.state_dict import StateDict, entries_below
from flwr_hetero_studies.rivals.node_memory import NodeMemory


def mirrored_weights(counts: ArrayLike) -> NDArray[np.float64]:
    r"""Weight each tier by the updates of its mirror: the slowest by those of the fastest.

    .. math:: w = \sum_{m=1}^{M} \frac{T_{M+1-m}}{\sum_k T_k} w_m

    over the tiers that have a model. In the paper's formula, the initial model would stay until all
    tiers have one.

    >>> mirrored_weights([6, 3, 1]), mirrored_weights([4, 0, 0])
    (array([0.1, 0.3, 0.6]), array([1., 0., 0.]))
    """
    number = np.asarray(counts, np.float64)
    known = number[number > 0]
    weights = np.zeros(len(number))
    weights[number > 0] = known[::-1] / known.sum()
    return weights


class FedAT(NodeMemory, Rule):
    r"""Train in tiers: synchronously within a tier, asynchronously across tiers.

    Chai et al., "FedAT: A High-Performance and Communication-Efficient Federated Learning System
    with Asynchronous Tiers", SC 2021. A tier asks ``clients_per_round`` of its nodes. When all of
    these have replied or failed, the mean of their models is the model of the tier. The global
    model is the mean of the models of ``num_tiers`` tiers, by :func:`mirrored_weights`.

    The paper times the nodes before training. Here all nodes begin at once and fill the tiers in
    the order of their first replies. A node that joins later goes to the first tier with a node as
    slow. Wrap ``FedProx`` for the paper's proximal term. Its compression is not implemented.
    """

    facts = "tier", "slowest_s", "counts", "num_first"
    decides = Rule.decides | {"the global model"}
    count_argument = "clients_per_round"
    clients_per_round: int

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        num_tiers: int = 5,
        *,
        seed: int = 0,
    ) -> None:
        check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = check_count("num_tiers", num_tiers, 1)
        super().__init__(strategy, seed=seed)
        self.clients_per_round = clients_per_round
        self.tier: dict[str, int] = {}
        self.slowest_s = [0.0] * num_tiers
        self.counts = [0] * num_tiers
        self.models: dict[int, ArrayRecord] = {}
        self.num_first = self._due = 0
        self._in_flight: set[int] = set()

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        self.num_first = self.num_first or len(idle)
        tiers = {node: self.tier.get(self.identity(node)) for node in idle}
        chosen = {node for node, tier in tiers.items() if tier is None}
        for tier in range(self.num_tiers):
            free = [node for node in idle if tiers[node] == tier]
            if free and not self._is_open(tier):
                count = min(self.clients_per_round, len(free))
                drawn = self.rng.choice(len(free), count, replace=False).tolist()
                chosen |= {free[i] for i in drawn}
        return sorted(chosen)

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        self._in_flight |= {message.metadata.dst_node_id for message in messages}
        return messages

    def failed(self, node_id: int) -> None:
        self._in_flight.discard(node_id)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        for update in waiting:
            self._in_flight.discard(update.pending.node_id)
            name = self.identity(update.pending.node_id)
            if name not in self.tier:
                self._add(name, update.arrived_s - update.pending.sent_s)
        tiers = [self.tier[self.identity(update.pending.node_id)] for update in waiting]
        for tier in sorted({*tiers}):
            if not self._is_open(tier):
                self._due = tier
                return [u for u, each in zip(waiting, tiers, strict=True) if each == tier]
        return []

    def _is_open(self, tier: int) -> bool:
        """Return whether a node of a tier is in flight, or one that may become its member."""
        tiers = {self.tier.get(self.identity(node)) for node in self._in_flight}
        return tier in tiers or (None in tiers and self._filling() == tier)

    def _filling(self) -> int:
        """Return the tier of the next node that replies for the first time, if one is not full."""
        return len(self.tier) * self.num_tiers // max(1, self.num_first)

    def _add(self, name: str, latency_s: float) -> None:
        self.tier[name] = tier = self._filling()
        if tier < self.num_tiers:
            self.slowest_s[tier] = latency_s
        else:
            self.tier[name] = int(np.searchsorted(self.slowest_s[:-1], latency_s))

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        return Shares(np.ones(len(updates)), factors=np.ones(len(updates)))

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        return reply

    def aggregate_train(
        self, server_round: int, replies: Any, context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        context = self.given(context)
        if self.updates:
            # Wrappers inside this one see the model from which the tier started.
            first = next(iter(self.updates.values())).pending.instruction
            context.arrays = next(iter(first.content.array_records.values()))
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if arrays is None or why_no_model(arrays):
            return arrays, metrics
        self.models[self._due] = arrays
        self.counts[self._due] += 1
        tiers = sorted(self.models)
        models = [self.models[tier] for tier in tiers]
        mean = mean_arrays(models, mirrored_weights(self.counts)[tiers], context.arrays)
        return with_left_out(mean, context), metrics

    def on_start(self, run: Run) -> None:
        """Begin without models of tiers; after a resume, identify the nodes of each tier."""
        if run.round < 0:
            self.models = {}
            self.counts = [0] * self.num_tiers
        super().on_start(run)

    def round_info(self) -> dict[str, Any]:
        return super().round_info() | ({"tier": self._due} if self.updates else {})

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        for tier, arrays in self.models.items():
            state |= {f"model/{tier}/{name}": array.numpy() for name, array in arrays.items()}
        return state

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        for entry, values in entries_below("model/", state).items():
            tier, _, name = entry.partition("/")
            self.models.setdefault(int(tier), ArrayRecord())[name] = Array(np.asarray(values))
