"""FedBuff as a wrapper: who starts, when replies are merged, and what each counts."""

import json
from collections import Counter
from collections.abc import Set
from dataclasses import asdict
from logging import INFO
from math import inf
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.asynchronous.algorithm import (
    Floats,
    Usual,
    Weights,
    default_buffer,
    largest_weight,
    merge_weights,
    staleness_weights,
)
from flwr_hetero.asynchronous.engine import Paused, run_asynchronously
from flwr_hetero.asynchronous.rule import Arrival
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import check_enough_updates, check_unscaled
from flwr_hetero.server.nodes import online_nodes
from flwr_hetero.server.rounds import Loop
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

STALENESS = {"sqrt": 0.5, "none": 0.0}
WEIGHTINGS = ("fair", "sqrt", "examples", "equal")
POWERS = {"fair": (1.0, 1.0), "sqrt": (0.5, 0.5), "examples": (1.0, 0.0), "equal": (0.0, 0.0)}
"""Powers of the wrapped strategy's weight and of the interval between replies."""


class FedBuff(Selection):
    r"""Keep nodes at work all the time and merge their updates as they come.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_{i \in buffer} \frac{v_i}{\bar v} \,
              \frac{w_i - w_{start}}{\sqrt{1 + s_i}}

    No round waits for its slowest node, and no profiling is needed. ``num_rounds`` of ``start``
    counts merges. Put what sets steps inside: with
    ``FedBuff(LocalSteps(budget="slice"))`` each node gets the steps that fit a time slice, so
    that slow nodes answer about as often as quick ones.

    Parameters
    ----------
    strategy : Strategy, optional
        What merges the updates, as it would those of a round: any Flower strategy that derives
        from FedAvg, or a wrapper; FedAvg if left out.
    concurrency : int, optional
        Nodes that train at the same time, drawn uniformly from the idle ones; None: all online.
    buffer_size : int, optional
        Updates K in a merge; None: half of the nodes at work, at least 3.
    staleness : {"sqrt", "none"} or float
        Weight of an update that started s merges ago: 1 / sqrt(1 + s), 1, or with the exponent
        of 1 / (1 + s).
    weighting : {"fair", "sqrt", "examples", "equal"}
        ``fair``: as the wrapped strategy weights (by examples), times the node's usual seconds
        between two replies, so that nodes do not count more because they answer more often, nor
        less because they are always stale; a node that has sent half of a buffer waits.
        ``sqrt``: the root of that: a quick node's data count more, by the root of its pace, and
        heavy weights bring less noise. ``examples``: as the wrapped strategy weights. ``equal``:
        all alike, the paper's rule.
    rate_correction : float, optional
        Power in [0, 1] with which a node's reporting rate is undone, in place of that of
        ``weighting``.
    max_weight : float, optional
        Where the rate is corrected: largest weight of an update, in means; what it cuts off is in
        the history. None: twice the weight that a tenth of the nodes reach.
    seed : int
        Of the draw of nodes.

    Raises
    ------
    ValueError
        If a setting is out of range, the wrapped strategy has a selection of its own or trains
        trees, or a wrapper works in rounds only.

    Notes
    -----
    The update is the difference to the model that the node started from. The wrapped strategy
    sees it added to the present model, as if all nodes of a buffer had just trained on that.
    Sums are divided by K and not by the weights, as in the paper, so that stale updates make the
    step smaller. A node whose reply is bad or does not come is left alone for 10 s, or for the
    time-out, and twice as long each time; one that is away for as long as its last job took at
    first, and four times as long each time. A run ends when all nodes have failed six times in a
    row. Nodes evaluate when they are idle next, beside those that train, in a tenth of the time
    at most, and at the end. A resumed run loses no merge, and its draws and weights go on where
    they were; what was under way or waited to be merged is asked again with the newest model.
    Draws depend on node ids, which are random in Flower's simulation.

    References
    ----------
    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.

    Examples
    --------
    >>> from flwr_hetero.strategy import LocalSteps
    >>> strategy = FedBuff(LocalSteps(fast_steps=20, budget="slice"), concurrency=10)
    >>> paper = FedBuff(concurrency=100, buffer_size=10, weighting="equal")
    """

    name: ClassVar[str] = "fedbuff"
    decides = frozenset({"selection", "loop", "waiting"})
    count_argument = "concurrency"
    outside_of = frozenset({"steps"})
    wake_s = inf
    unit: str = "merge"
    evaluates_each_round = False

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        buffer_size: int | None = None,
        staleness: str | float = "sqrt",
        weighting: str = "fair",
        rate_correction: float | None = None,
        max_weight: float | None = 4.0,
        seed: int = 0,
    ) -> None:
        if concurrency is not None:
            check_count("concurrency", concurrency, 1)
        if buffer_size is not None:
            check_count("buffer_size", buffer_size, 1)
        if isinstance(staleness, str):
            check_choice("staleness", staleness, tuple(STALENESS), "or give an exponent")
            self.exponent = STALENESS[staleness]
        else:
            self.exponent = check_number("staleness", staleness, "[0, inf)")
        self.rng = np.random.default_rng(check_count("seed", seed))
        super().__init__(strategy)
        if trains_trees(self.leaf):
            rule = "average models: updates of trees cannot be added to a newer model"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        check_enough_updates(self.leaf, buffer_size, "buffer_size")
        self.concurrency, self.buffer_size = concurrency, buffer_size
        self.weighting = check_choice("weighting", weighting, WEIGHTINGS)
        self.powers = POWERS[weighting]
        if rate_correction is not None:
            check_number("rate_correction", rate_correction, "[0, 1]")
            self.powers = self.powers[0], rate_correction
        if self._undoes_pace:
            name = "weighting" if rate_correction is None else "rate_correction"
            check_unscaled(self, name, weighting if rate_correction is None else rate_correction)
        if max_weight is not None:
            check_number("max_weight", max_weight, "[1, inf)")
        self.max_weight = max_weight
        self.paused: Paused | None = None
        self.last_reply_s: dict[str, float] = {}
        self.usual: dict[str, Usual] = {}
        self._size = 1
        self._starting: list[int] = []
        self._arrivals: dict[str, Arrival] = {}
        self._staleness: dict[str, int] = {}
        self._times_s: dict[str, tuple[float, float | None]] = {}  # at work, idle before
        self._factors: dict[str, float] = {}
        self._info: dict[str, Any] = {}

    # --- the loop -----------------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """Without rounds."""
        return lambda run: run_asynchronously(run, self)

    def next_nodes(self, idle: list[int], at_work: int, buffer: list[Arrival]) -> list[int]:
        """Draw the nodes that start now (Alg. 1, l. 1 and 5); if fair, none fills the buffer."""
        if self._undoes_pace and at_work:
            often = Counter(arrival.sent.node_id for arrival in buffer)
            idle = [node for node in idle if often[node] < max(2, (self._size + 1) // 2)]
        room = len(idle) if self.concurrency is None else max(0, self.concurrency - at_work)
        if room < len(idle):
            chosen = self.rng.choice(len(idle), room, replace=False).tolist()
            idle = [idle[i] for i in sorted(chosen)]
        self._starting = idle
        return idle

    def due(self, buffer: list[Arrival], team: int) -> list[Arrival]:
        """Return the first K updates when there are as many (Alg. 1, l. 6)."""
        self._size = self.buffer_size or self._usual_size(min(self.concurrency or team, team))
        return buffer[: self._size] if len(buffer) >= self._size else []

    def _usual_size(self, in_flight: int) -> int:
        """Return K where it is not given."""
        return default_buffer(in_flight)

    def failed(self, node_id: int) -> None:
        """Go on: the next idle node takes its place."""

    def ends_round(self, team: int) -> bool:
        """Count merges as rounds."""
        return True

    def merging(self, context: Exchange, arrivals: list[Arrival], version: int) -> None:
        """Note each update's staleness (l. 3), and how long its node worked and was idle."""
        self._arrivals = {a.sent.instruction.metadata.message_id: a for a in arrivals}
        self._staleness, self._times_s, self._info = {}, {}, {}
        for message_id, arrival in self._arrivals.items():
            node = self.identity(arrival.sent.node_id)
            self._staleness[message_id] = version - arrival.version
            before_s = self.last_reply_s.get(node)
            idle_s = None if before_s is None else max(0.0, arrival.sent.sent_s - before_s)
            self._times_s[message_id] = arrival.arrived_s - arrival.sent.sent_s, idle_s
            self.last_reply_s[node] = arrival.arrived_s

    # --- hooks ----------------------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Return the nodes that were drawn."""
        return [node for node in self._starting if node in online]

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Show all nodes: they evaluate when they are idle next."""
        return sorted(online_nodes(grid)) if self._inner_evaluates else []

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add each update to the present model, scaled by its staleness and the merge's step."""
        if not replies:
            return replies
        stale = [self._staleness[reply.metadata.reply_to_message_id] for reply in replies]
        discounts = staleness_weights(stale, self.exponent)
        found = self._weigh(context, replies, discounts)
        scales = found.step * self._even(replies, discounts)
        pairs = zip(replies, scales.tolist(), strict=True)
        moved = [self._rebased(context, reply, scale) for reply, scale in pairs]
        self._note(replies, step=found.step, clipped_share=found.clipped_share)
        return super().on_replies(context, moved)

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Weigh the updates, by default so that no node counts by its speed."""
        if self.powers == (0.0, 0.0):  # the paper's rule
            return [1.0] * len(replies)
        factors = [self._factors[reply.metadata.reply_to_message_id] for reply in replies]
        return [w * f for w, f in zip(super().weights(context, replies), factors, strict=True)]

    def _weigh(self, context: Exchange, replies: list[Message], discounts: Floats) -> Weights:
        """Learn what is usual of these nodes, and set the factors of this merge's weights."""
        if self.powers == (0.0, 0.0):  # the paper's rule
            return Weights(np.ones(len(replies)), 1.0, 0.0)
        weights, nodes = super().weights(context, replies), []
        for reply, weight, discount in zip(replies, weights, discounts.tolist(), strict=True):
            node = self.identity(reply.metadata.src_node_id)
            times_s = self._times_s[reply.metadata.reply_to_message_id]
            self.usual.setdefault(node, Usual()).see(weight, *times_s, discount)
            nodes.append(node)
        intervals_s = self._intervals_s()
        mine = [intervals_s[node] for node in nodes]
        all_s = np.array([intervals_s[node] for node in self.usual])
        every = np.array([usual.weight for usual in self.usual.values()])
        a, b = self.powers
        usual = every**a * all_s**b
        most = self._limit(usual, 1 / all_s) if self._undoes_pace else inf
        found = merge_weights(np.power(weights, a) * np.power(mine, b), usual, 1 / all_s, most)
        factors = found.weights / np.where(weights, weights, 1.0)
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        self._factors = dict(zip(ids, factors.tolist(), strict=True))
        return found

    @property
    def _undoes_pace(self) -> bool:
        """Whether a node's updates weigh the less, the more often it answers."""
        return self.powers[1] > 0

    def _limit(self, weights: NDArray[np.float64], replies_per_s: NDArray[np.float64]) -> float:
        """Return the largest weight of an update, in means."""
        if self.max_weight is not None:
            return self.max_weight
        return largest_weight(weights) / float(np.average(weights, weights=replies_per_s))

    def _intervals_s(self) -> dict[str, float]:
        """Return the usual time between each node's replies."""
        starts = sum(usual.starts for usual in self.usual.values())
        idle_s = sum(u.starts * u.idle_s for u in self.usual.values()) / max(1, starts)
        return {node: usual.interval_s(idle_s) for node, usual in self.usual.items()}

    def _even(self, replies: list[Message], discounts: Floats) -> NDArray[np.float64]:
        """Weigh down only what is staler than is usual for its node, or slow ones count less."""
        if not self._undoes_pace:
            return discounts
        nodes = [self.identity(reply.metadata.src_node_id) for reply in replies]
        own = np.array([self.usual[node].discount for node in nodes])
        return np.asarray(self._usual_discount * discounts / own)

    @property
    def _usual_discount(self) -> float:
        """Mean factor of stale updates over all replies."""
        every = [usual.discount for usual in self.usual.values()]
        replies_per_s = [1 / interval_s for interval_s in self._intervals_s().values()]
        return float(np.average(every, weights=replies_per_s))

    def _rebased(self, context: Exchange, reply: Message, scale: float) -> Message:
        """Add a node's update to the present model (Alg. 1, l. 7)."""
        message_id, now = reply.metadata.reply_to_message_id, context.arrays
        start = next(iter(context.instruction_of(reply).content.array_records.values()))
        if scale == 1.0 and not self._staleness[message_id]:
            return reply
        return with_update(reply, start, now, scale)

    def _note(self, replies: list[Message], **more: Any) -> None:
        """Keep what the history says of this merge."""
        good = {reply.metadata.reply_to_message_id for reply in replies}
        arrivals = [arrival for i, arrival in self._arrivals.items() if i in good]
        self._info = {
            "nodes": [self.identity(arrival.sent.node_id) for arrival in arrivals],
            "staleness": [self._staleness[i] for i in self._arrivals if i in good],
            "age_s": [a.arrived_s - a.sent.sent_s for a in arrivals],
            **more,
        }

    # --- history and state -------------------------------------------------------------

    def round_info(self) -> dict[str, Any]:
        """Return the merged replies in order of arrival, with staleness and age."""
        return self._info

    def state_dict(self) -> StateDict:
        """Return the generator, when each node replied last, and what is usual of its replies."""
        return {
            "rng": rng_to_str(self.rng),
            "last_reply_s": json.dumps(self.last_reply_s),
            "usual": json.dumps({node: asdict(usual) for node, usual in self.usual.items()}),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"rng": str, "last_reply_s": str, "usual": str}, "FedBuff")
        self.rng = rng_from_str(str(state["rng"]))
        self.last_reply_s = json.loads(str(state["last_reply_s"]))
        usual = json.loads(str(state["usual"]))
        self.usual = {node: Usual(**means) for node, means in usual.items()}

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        nodes = "all nodes" if self.concurrency is None else f"{self.concurrency} nodes"
        size = self.buffer_size or "half of them"
        text = "\t├──> FedBuff: %s at work, %s in a merge, weighted %s"
        log(INFO, text, nodes, size, self.weighting)
        super().summary()
