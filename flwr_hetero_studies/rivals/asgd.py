"""Rivals that change the model whenever a reply arrives: FedAsync, Rescaled and Ringleader ASGD."""

from math import inf
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.asynchronous.algorithm import Shares, staleness_exponent, staleness_weights
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import MeansOfNodes, RateCorrection, Rule
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.aggregate import with_update
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import BUFFERS, arrays_in, config_of, step_between, view_array
from flwr_hetero.server.client_support import STEPS
from flwr_hetero.server.composition import check_enough_updates
from flwr_hetero.server.loop import Run
from flwr_hetero.state_dict import StateDict

Gradient = dict[str, NDArray[Any]]
"""A node's update: the parameters that it returned minus those that it started from, by name."""


class FedAsync(Rule):
    r"""Mix each node's model into the global model when it arrives; a stale one counts less.

    .. math:: w \leftarrow (1 - \alpha_s) w + \alpha_s w_i, \qquad \alpha_s = \alpha (1 + s)^{-a}

    Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020. Unlike
    ``FedBuff(buffer_size=1)``, it pulls the newest model back to where the node started. All floats
    are mixed, including running statistics. Wrap ``FedProx`` for the paper's proximal term.
    """

    # The paper has no limit.
    node_limit = None

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        mixing: float = 0.6,
        staleness: str | float = "sqrt",
        seed: int = 0,
    ) -> None:
        self.mixing = check_number("mixing", mixing, "(0, 1]")
        self.staleness = staleness
        self.exponent = staleness_exponent(staleness)
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, 1, "the number of updates at a time")

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        return waiting[:1]

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        started = [update.pending.version for update in updates]
        return Shares(staleness_weights(started, self.version, self.exponent))

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        return with_update(reply, context.arrays, context.arrays, self.mixing * scale, ())


class LocalASGD(Rule):
    """Ask each node for the same local steps, whose update stands for a gradient."""

    decides = Rule.decides | {"steps"}
    client_support = (STEPS,)
    # The papers have no limit.
    node_limit = None

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        num_steps: int | None = None,
        server_rate: float = 1.0,
        concurrency: int | None = None,
        seed: int = 0,
    ) -> None:
        self.num_steps = None if num_steps is None else check_count("num_steps", num_steps, 1)
        self.server_rate = check_number("server_rate", server_rate, "(0, inf)")
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, 1, "the number of updates at a time")

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        if self.num_steps is not None:
            for message in messages:
                config_of(message)[keys.NUM_STEPS] = self.num_steps
        return messages


class RescaledASGD(LocalASGD):
    r"""Add each node's update when it arrives, scaled by the interval between its updates.

    .. math:: w \leftarrow w + \eta \frac{\tau_i}{\tau} (w_i - w_{start}), \qquad
              \frac{1}{\tau} = \frac{1}{n} \sum_j \frac{1}{\tau_j}

    Mahran, Maranjyan and Richtarik, "Rescaled Asynchronous SGD: Optimal Distributed Optimization
    under Data and System Heterogeneity", 2026 (arXiv 2605.13434). A node that answers half as often
    moves the model twice as far, so that in the long run all nodes move it alike.

    Parameters
    ----------
    num_steps : int, optional
        Local steps of a message; None: the node's usual epoch.
    server_rate : float
        :math:`\eta`, the mean weight of the updates that arrive.

    Notes
    -----
    The paper's gradient is here a node's update in some local steps, which keeps its weight when it
    is stale. In the paper times are fixed and all workers compute all the time, so that a worker's
    time is also the interval between two of its updates. Here only ``concurrency`` nodes are in
    flight and the others wait, and only with the interval do all nodes have the same weight. It is
    measured on the fleet's clock, as by ``FedBuff``: the mean time in flight of a node's last
    replies, and its mean time idle, shrunk towards that of all nodes. n are the nodes that have
    replied. ``FedBuff``'s limit on the weight of one update does not apply.
    """

    def __init__(self, strategy: Strategy | None = None, **settings: Any) -> None:
        super().__init__(strategy, **settings)
        self.times = RateCorrection((0.0, 1.0))

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        return waiting[:1]

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Scale an update by its node's interval, over the mean interval of all updates."""
        (update,) = updates
        node = self.identity(update.pending.node_id)
        self.times.learn(node, 1.0, update.pending.sent_s, update.arrived_s, 1.0)
        intervals_s = self.intervals_s()
        mean_s = len(intervals_s) / sum(1 / interval_s for interval_s in intervals_s.values())
        return Shares(np.ones(1), self.server_rate * intervals_s[node] / mean_s)

    def intervals_s(self) -> dict[str, float]:
        """Return the time from an update of a node to its next one, by node."""
        means = self.times.means
        idle_s = [times.idle_s for times in means.values() if times.starts]
        usual_s = float(np.mean(idle_s)) if idle_s else 0.0
        intervals_s = MeansOfNodes.of(means.values()).intervals_s(usual_s)
        return dict(zip(means, intervals_s.tolist(), strict=True))

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"times": self.times.to_str()}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.times.load_str(str(state["times"]))


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
