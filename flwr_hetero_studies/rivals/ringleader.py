"""Ringleader ASGD: a table of every worker's gradients, and as many updates a round as workers."""

from math import inf
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import BUFFERS, arrays_in, step_between, view_array
from flwr_hetero.server.loop import Run
from flwr_hetero_studies.rivals.asgd import LocalASGD

Gradient = dict[str, NDArray[Any]]
"""A node's update: the parameters that it returned minus those that it started from, by name."""


class GradientTable:
    r"""Gradients by worker, and their mean within a worker, then over workers.

    .. math:: \bar g = \frac{1}{n} \sum_i \frac{1}{b_i} \sum_{j=1}^{b_i} g_{ij}

    >>> table = GradientTable()
    >>> for node, value in ((7, 1.0), (7, 2.0), (8, 4.5)):
    ...     table.add(node, {"w": np.array(value)})
    >>> float(table.mean()["w"])
    3.0
    """

    def __init__(self) -> None:
        self.means: dict[int, Gradient] = {}
        self.counts: dict[int, int] = {}
        # The sum of the workers' means is needed after every gradient.
        self.total: Gradient = {}

    def add(self, node: int, gradient: Gradient) -> None:
        self.counts[node] = count = self.counts.get(node, 0) + 1
        means = self.means.setdefault(node, {})
        for name, new in gradient.items():
            change = (new - means.get(name, 0.0)) / count
            means[name] = means.get(name, 0.0) + change
            self.total[name] = self.total.get(name, 0.0) + change

    def mean(self) -> Gradient:
        return {name: total / len(self.means) for name, total in self.total.items()}


class RingleaderASGD(LocalASGD):
    r"""Gather updates of all nodes, then take a step for each of them by the mean of all.

    .. math:: w \leftarrow w + \frac{\eta}{n} \cdot
              \frac{1}{n} \sum_i \frac{1}{b_i} \sum_{j=1}^{b_i} (w_{ij} - w_{start,ij})

    Maranjyan and Richtarik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time
    Complexity under Data Heterogeneity", ICLR 2026. Phase 1 of a round gathers until the table has
    an update of every node, and ends with a step. In phase 2 the next update of each other node
    goes into the table and makes a step in turn. Further updates belong to the next round.

    Parameters
    ----------
    num_steps : int, optional
        Local steps of a message; None: the node's usual epoch.
    server_rate : float
        :math:`\eta`, the length of all n steps of a round together; with 1 it is that of FedAvg.

    Notes
    -----
    The paper's gradient is here a node's update in some local steps. In the paper all workers
    compute all the time. Here only ``concurrency`` nodes are in flight. Those start first whose
    update makes a step of this round, then those without an update in the next table, in both cases
    the slowest first, so that a round is short. Others are drawn uniformly. The paper's workers do
    not fail; here a node that fails is not waited for until it is idle again. After a resume a new
    round begins with an empty table.
    """

    def __init__(self, strategy: Strategy | None = None, **settings: Any) -> None:
        super().__init__(strategy, **settings)
        self.table = GradientTable()
        self._workers: set[int] = set()
        # Nodes whose next update makes a step of this round.
        self._owed: set[int] = set()
        self._took_s: dict[int, float] = {}
        self._stepped: dict[str, Array] = {}

    def on_start(self, run: Run) -> None:
        if run.round < 0:
            self._owed = set()
            self._took_s = {}
        super().on_start(run)

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        self._workers = {*idle, *(self.fleet.queue.busy if self.fleet.queue else ())}
        gathered = {update.pending.node_id for update in waiting}
        drawn = [idle[i] for i in self.rng.permutation(len(idle)).tolist()]
        drawn.sort(key=lambda node: self._turn(node, gathered))
        return sorted(drawn[: self.room(len(idle), in_flight)])

    def _turn(self, node: int, gathered: set[int]) -> tuple[int, float]:
        """Return when it is a node's turn, in the order of the Notes."""
        slowest_first = -self._took_s.get(node, inf)
        if node in self._owed:
            return 0, slowest_first
        if node not in gathered:
            return 1, slowest_first
        return 2, 0.0

    def arrived(self, update: Update) -> None:
        self._took_s[update.pending.node_id] = update.arrived_s - update.pending.sent_s

    def failed(self, node_id: int) -> None:
        self._workers.discard(node_id)
        self._owed.discard(node_id)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        # In phase 2 the update of a node that has made no step in this round is due.
        self._owed &= self._workers
        if self._owed:
            first = next((u for u in waiting if u.pending.node_id in self._owed), None)
            if first is not None:
                self._owed.remove(first.pending.node_id)
            return [] if first is None else [first]
        # In phase 1 all updates are due when every node has one.
        gathered = {update.pending.node_id for update in waiting}
        if not gathered or self._workers - gathered:
            return []
        self.table = GradientTable()
        # The last update makes the first step of the round.
        self._owed = gathered - {waiting[-1].pending.node_id}
        return list(waiting)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        return Shares(np.ones(len(updates)))

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add the updates to the table before any of them moves the model."""
        for reply in replies:
            pending = self.updates[reply.metadata.reply_to_message_id].pending
            self.table.add(pending.node_id, gradient_of(pending.instruction, reply))
        # The step is eta / n of the mean, the same for all updates that are added now.
        step = self.server_rate / max(1, len(self.table.means))
        self._stepped = {}
        for key, mean in self.table.mean().items():
            before = view_array(context.arrays[key])
            self._stepped[key] = Array(np.asarray(before + step * mean, before.dtype))
        return super().on_replies(context, replies)

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Return the model after a step by the table's mean."""
        ((name, arrays),) = arrays_in(reply.content).items()
        model = ArrayRecord({**arrays, **self._stepped})
        content = RecordDict({**reply.content, name: model})
        return Message(content, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]


def gradient_of(instruction: Message, reply: Message) -> Gradient:
    """Return a node's update of parameters, without running statistics and counters."""
    (start,) = arrays_in(instruction.content).values()
    (end,) = arrays_in(reply.content).values()
    both = {key: (view_array(start[key]), view_array(array)) for key, array in end.items()}
    return {
        key: step_between(before, after)
        for key, (before, after) in both.items()
        if before.dtype.kind == "f" and not key.endswith(BUFFERS)
    }
