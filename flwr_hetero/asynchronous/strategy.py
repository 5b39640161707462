"""Strategies without rounds: their common base class, FedBuff, and how often nodes reply."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from logging import WARNING
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.asynchronous import algorithm
from flwr_hetero.asynchronous.algorithm import NODE_LIMIT, Floats, Shares
from flwr_hetero.asynchronous.engine import AsynchronousRounds, Update
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.exchange.aggregate import with_update
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.nodes import Figure, GridView, online_nodes
from flwr_hetero.records import arrays_in
from flwr_hetero.server.composition import check_enough_updates, check_unscaled, name_of
from flwr_hetero.server.loop import Rounds, Run
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict, rng_from_str, rng_to_str

POWERS = {"fair": (1.0, 1.0), "sqrt": (0.5, 0.5), "examples": (1.0, 0.0), "equal": (0.0, 0.0)}
"""By weighting: the powers of the wrapped strategy's weight and of the interval between replies."""
MANY_IDLE = 200
"""Idle nodes of which all are looked at for each reply; of more, only some are."""
CANDIDATES = 20
"""Number of idle nodes that are looked at then, for each node that is to be drawn."""
KNOWN = 3
"""Replies after which a node's rate is known: the first replies depend on the start of the run."""
MEMORY = 10
"""Replies over which a node's means are taken."""
USUAL_IDLE = 0.25
"""Quantile of all nodes' idle times that counts as usual."""
PRIOR = 5
"""Number of a node's own idle times that the usual one stands for."""
IDLE_MEMORY = 20
"""Idle times over which their mean is taken."""
IDLE_OUTLIER = 3.0
"""Largest idle time that counts, in mean intervals between two replies."""
OUTLIER = 10.0
"""Largest interval between two replies that counts, in mean intervals."""
SHORTEST_S = 1e-3
"""Smallest interval between two replies that counts, in seconds."""


class Rule(Selection):
    """Keep nodes in flight; a rule decides which nodes to ask and when to update the model."""

    name: ClassVar[str] = "fedbuff"  # Reports show the same information for all rules.
    decides = frozenset({"selection", "loop", "waiting"})
    count_argument = "concurrency"
    outside_of = frozenset({"steps"})
    # The name of a round in the log.
    unit = "server update"
    # Whether nodes evaluate the model of every round. If not, they spend a tenth of the time on it.
    evaluates_each_round = False
    # Largest share of one node in all updates, in even shares. None: no limit, and a server update
    # may have several updates of a node.
    node_limit: float | None = NODE_LIMIT

    def __init__(
        self, strategy: Strategy | None = None, *, concurrency: int | None = None, seed: int = 0
    ) -> None:
        if concurrency is not None:
            check_count("concurrency", concurrency, 1)
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        super().__init__(strategy)
        if trains_trees(self.leaf):
            rule = "average models: updates of trees cannot be added to a newer model"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        self.concurrency = concurrency
        self.version = 0
        self.turns = algorithm.Turns()
        # Number of idle nodes that were not asked.
        self.resting = 0
        # Nodes that are asked as soon as a simulation has shown whose clock counts.
        self.unsent: list[int] = []
        # The updates of this server update, by message.
        self.updates: dict[str, Update] = {}
        # The last run, which the next run may continue.
        self.engine: AsynchronousRounds | None = None
        self._factors: dict[str, float] | None = None
        self._info: dict[str, Any] = {}

    # --- the rule: override these ----------------------------------------------

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Return the idle nodes that start now, drawn uniformly until there is no room.

        A node rests while an update of it waits, and while it is ahead of its share.
        """
        num_idle = len(idle)
        room = self.room(num_idle, in_flight)
        num_nodes = min(self.concurrency or inf, in_flight + num_idle)
        self.turns.cost = num_nodes / (self.node_limit or inf)
        # In a large fleet, the nodes are drawn among some idle ones, which are drawn first.
        num_candidates = CANDIDATES * max(1, room)
        if num_idle > max(MANY_IDLE, num_candidates):
            # A draw without replacement takes several times as long. A place drawn twice is one.
            places = set(self.rng.integers(num_idle, size=num_candidates).tolist())
            idle = [idle[place] for place in sorted(places)]
        # If no other node is in flight, none of these has to rest.
        if in_flight and self.node_limit:
            held = {update.pending.node_id for update in waiting}
            free = [node for node in idle if node not in held]
            idle = [node for node in free if self.turns.may_go(self.identity(node))]
        chosen = self.draw(idle, room)
        self.turns.take([self.identity(node) for node in chosen])
        self.resting = num_idle - len(chosen)
        return chosen

    def room(self, num_idle: int, in_flight: int) -> int:
        """Return how many of the idle nodes may start."""
        return num_idle if self.concurrency is None else max(0, self.concurrency - in_flight)

    def draw(self, idle: list[int], room: int) -> list[int]:
        """Draw nodes from those that may start, until there is no room."""
        return algorithm.draw_nodes(idle, room, self.rng)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the updates that are added to the model now, or an empty list."""
        raise NotImplementedError

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Return the shares of updates; ``weights`` are those of the wrapped strategy."""
        raise NotImplementedError

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model."""
        start = next(iter(arrays_in(update.pending.instruction.content).values()))
        if scale == 1.0 and update.pending.version == self.version:
            return reply
        return with_update(reply, start, context.arrays, scale)

    def ends_round(self) -> bool:
        """Return whether the latest server update is the last one of its round."""
        return True

    def arrived(self, update: Update) -> None:
        """Learn that a node has sent a good reply."""

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""
        self.turns.give_back(self.identity(node_id))

    @property
    def wake_s(self) -> float:
        """Time on the fleet's clock until which the next reply is waited for at most."""
        return inf

    # --- what a run asks -------------------------------------------------------

    def make_rounds(self, run: Run) -> Rounds:
        """Return rounds without waiting, or those of the last run if this one continues it."""
        if self.node_limit is not None:
            check_number("node_limit", self.node_limit, "[1, inf)", "or None, for no limit")
        engine = self.engine
        self.engine = None
        if engine is None or not engine.may_continue(run):
            return AsynchronousRounds(self)
        run.continues = True
        run.arrays = engine.newest
        return engine

    def begin(self, due: list[Update], version: int) -> None:
        """Prepare a server update of the model of a version."""
        self.updates = {update.pending.message_id: update for update in due}
        self.version = version
        self._info = {}

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Return the grid, which shows the chosen nodes only."""
        return grid

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Show all nodes: they evaluate when they are idle next."""
        return GridView(grid, sorted(online_nodes(grid)) if self._inner_evaluates else [])

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add each update to the present model, as if its node had started from that model."""
        if not replies:
            return replies
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        updates = [self.updates[message_id] for message_id in ids]
        shares = self.weigh(updates, super().weights(context, replies))
        # Alg. 1, l. 4 and 7: the wrapped strategy's mean of w + a(s) d_i is w + sum / K
        scales = (shares.step * shares.scales).tolist()
        factors = shares.factors
        self._factors = None if factors is None else dict(zip(ids, factors.tolist(), strict=True))
        added = [update for i, update in self.updates.items() if i in ids]
        self._info = {
            "nodes": [self.identity(update.pending.node_id) for update in added],
            "staleness": [self.version - update.pending.version for update in added],
            "age_s": [update.arrived_s - update.pending.sent_s for update in added],
            "step": shares.step,
            # These are lists, because a round of FedSlice has several server updates.
            "clipped_share": [shares.clipped_share],
            "bounded_share": [shares.bounded_share],
        }
        return [self.moved(context, *each) for each in zip(updates, replies, scales, strict=True)]

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Return the weights of the updates in their mean."""
        if self._factors is None:
            return [1.0] * len(replies)
        weights = zip(replies, super().weights(context, replies), strict=True)
        return [w * self._factors[reply.metadata.reply_to_message_id] for reply, w in weights]

    def on_train_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Do nothing, because there are no rounds to learn from."""

    def round_info(self) -> dict[str, Any]:
        """Return the added updates in order of arrival, with their staleness and age."""
        return self._info

    def state_dict(self) -> StateDict:
        """Return the state of the generator."""
        return {"rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.rng = rng_from_str(str(state["rng"]))


class FedBuff(Rule):
    r"""Keep nodes in flight all the time and add their updates to the model as they come.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_{i \in buffer} \frac{v_i}{\bar v} \,
              \frac{w_i - w_{start}}{\sqrt{1 + s_i}}

    No round waits for its slowest node, and ``num_rounds`` of ``start`` is the number of server
    updates. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
    2022. ValueError for a setting out of range, or a strategy that selects nodes, trains trees or
    needs rounds.

    >>> paper = FedBuff(concurrency=100, buffer_size=10, weighting="equal")

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that averages: a wrapper, or one that derives from FedAvg; FedAvg if left out.
    concurrency : int, optional
        Number of nodes in flight, drawn uniformly from the idle nodes. None: all nodes.
    buffer_size : int, optional
        Number K of updates in a server update. None: half of the nodes in flight, at least 3.
    staleness : {"sqrt", "none"} or float
        Weight of an update that started s server updates ago: 1 / sqrt(1 + s), 1, or the power of
        1 / (1 + s) with this exponent.
    weighting : {"fair", "sqrt", "examples", "equal"}
        ``fair``: the weight of the wrapped strategy (by examples), times the node's mean seconds
        between two replies. ``sqrt``: the root of that. ``examples``: the weight of the wrapped
        strategy. ``equal``: the paper's. No weight of the first two is more than twice what a tenth
        of the nodes reach.
    seed : int
        Seed of the draw of nodes.

    Notes
    -----
    A server update has one update of a node at most. With five or more nodes, it waits for all but
    one of them at most, so that no single node can delay it. No node sends more than
    :attr:`node_limit` (1.5) times an even share of all updates; None, the paper's rule, lifts it.

    A node is backed off if its reply is bad or missing, for longer each time. A run ends when all
    nodes have failed six times in a row. A node evaluates when it is idle, for a tenth of the time
    at most, and at the end of the run. After a resume, the nodes that were in flight are asked
    again, with the newest model.

    The first reply of a real node contains the time in which it loads the app. Until its second
    reply, a node counts as no slower than the slowest node that has sent two.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        buffer_size: int | None = None,
        staleness: str | float = "sqrt",
        weighting: str = "fair",
        seed: int = 0,
    ) -> None:
        if buffer_size is not None:
            check_count("buffer_size", buffer_size, 1)
        self.staleness = staleness
        self.exponent = algorithm.staleness_exponent(staleness)
        self.weighting = check_choice("weighting", weighting, tuple(POWERS))
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, buffer_size, "buffer_size")
        self.buffer_size = buffer_size
        self.rates = RateCorrection(POWERS[weighting])
        if self.rates.undoes_rate:
            check_unscaled(self, "weighting", weighting)
        self._warned_clipped = False

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the first K updates as soon as there are K."""
        num_nodes = in_flight + self.resting
        size = self.size_of(num_nodes)
        if self.node_limit is None:
            return algorithm.full_buffer(waiting, size)
        size = max(1, min(size, most_at_once(num_nodes)))
        return algorithm.full_buffer(first_of_each_node(waiting), size)

    def size_of(self, nodes: int) -> int:
        """Return K for a number of nodes."""
        return self.buffer_size or self.default_size(self.num_training(nodes))

    def num_training(self, nodes: int) -> int:
        """Return how many nodes train at the same time, of those that do not evaluate."""
        return min(self.concurrency or nodes, nodes)

    def check_nodes(self, nodes: int) -> None:
        """Refuse too few nodes, or too small a buffer, for a strategy that distrusts updates."""
        if self.node_limit is not None:
            name = "the number of nodes"
            check_enough_updates(self.leaf, nodes, name, most_at_once, ": start more nodes")
        size = self.size_of(nodes)
        hint = f", and buffer_size is {size} where it is not given"
        check_enough_updates(self.leaf, size, "buffer_size", hint=hint)

    def default_size(self, in_flight: int) -> int:
        """Return K if the user has not set it."""
        return algorithm.default_buffer(in_flight)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Discount stale updates, and by default undo differences in reporting rates."""
        started = [update.pending.version for update in updates]
        discounts = algorithm.staleness_weights(started, self.version, self.exponent)
        if self.rates.powers == POWERS["equal"]:
            return Shares(discounts)
        nodes = [self.identity(update.pending.node_id) for update in updates]
        loads = self.fleet.queue is not None and not self.fleet.queue.is_simulated
        replies = zip(nodes, weights, updates, discounts.tolist(), strict=True)
        for node, weight, update, discount in replies:
            sent_s = update.pending.sent_s
            self.rates.learn(node, weight, sent_s, update.arrived_s, discount, loads=loads)
        shares = self.rates.weigh(nodes, weights, discounts, self.conditions())
        known = all(self.rates.means[node].count >= KNOWN for node in nodes)
        if shares.clipped_share and known and not self._warned_clipped:
            self._warned_clipped = True
            text = "%s clipped %.0f %% of an update's weight. A node that replies far less often "
            text += "than the others is weighted up, at most twofold (see clipped_share)"
            log(WARNING, text, name_of(self), 100 * shares.clipped_share)
        return shares

    def conditions(self) -> Conditions:
        """Return what is known of the nodes beside their replies."""
        return Conditions(1 / self.turns.cost if self.turns.cost else None)

    def state_dict(self) -> StateDict:
        """Return the state of the generator, and the statistics of the nodes' replies."""
        return super().state_dict() | {"rates": self.rates.to_str()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.rates.load_str(str(state["rates"]))


def first_of_each_node(waiting: Sequence[Update]) -> list[Update]:
    """Return the first update of each node, in the order in which they came."""
    first: dict[int, Update] = {}
    for update in waiting:
        first.setdefault(update.pending.node_id, update)
    return list(first.values())


def most_at_once(nodes: int) -> int:
    """Return the largest number of nodes in a server update: of five or more, all but one."""
    return min(nodes, max(4, nodes - 1))


# --- how often each node replies, and weights that undo it: not in the paper -------------------


class Conditions(NamedTuple):
    """What is known of the nodes beside their replies."""

    largest_share: float | None = None
    """Largest share of one node in all replies; None: there is no limit."""
    in_turn: bool = False
    """Whether nodes are asked in turn, so that all reply equally often, whatever a reply takes."""
    bounds_lengths: bool = True
    """Whether updates that are far longer than most count less."""
    remembers: bool = True
    """Whether it counts how far updates have moved the model before.

    While few nodes are known, a bad one may be most of them."""


@dataclass
class ReplyMeans:
    """Running means of a node's last replies, and of more idle times."""

    weight: float = 0.0
    age_s: float = 0.0
    discount: float = 1.0
    count: int = 0
    idle_s: float = 0.0
    starts: int = 0

    def add(self, weight: float, age_s: float, idle_s: float | None, discount: float) -> None:
        """Add a reply."""
        self.count = min(self.count + 1, MEMORY)
        # After an absence, a time counts as ten usual ones at most.
        longest_s = OUTLIER * self.age_s if self.count > 1 else inf
        age_s = min(max(age_s, SHORTEST_S), longest_s)
        self.weight += (weight - self.weight) / self.count
        self.age_s += (age_s - self.age_s) / self.count
        self.discount += (discount - self.discount) / self.count
        if idle_s is not None:
            self.starts += 1
            longest_s = IDLE_OUTLIER * (self.age_s + self.idle_s) if self.starts > MEMORY else inf
            self.idle_s += (min(idle_s, longest_s) - self.idle_s) / min(self.starts, IDLE_MEMORY)


class MeansOfNodes(NamedTuple):
    """The running means of several nodes; each of shape (num_nodes,).

    >>> MeansOfNodes.of([ReplyMeans(age_s=5.0)]).intervals_s(usual_idle_s=1.0)
    array([6.])
    """

    weight: Floats
    age_s: Floats
    discount: Floats
    idle_s: Floats
    starts: Floats

    @classmethod
    def of(cls, means: Collection[ReplyMeans]) -> MeansOfNodes:
        """Put the means of some nodes into arrays."""
        rows = [(m.weight, m.age_s, m.discount, m.idle_s, m.starts) for m in means]
        return cls(*np.array(rows, np.float64).T)

    def intervals_s(self, usual_idle_s: float) -> Floats:
        """Return the times from reply to reply; a node without any reply rests the usual time."""
        # Idle nodes are drawn uniformly, so that a few of a node's own idle times are only noise.
        rested_s = PRIOR * usual_idle_s + self.starts * self.idle_s
        return self.age_s + rested_s / (PRIOR + self.starts)


class AllReplies(NamedTuple):
    """What is usual of the replies of all nodes."""

    idle_s: float
    """The idle time of a node with few replies."""
    in_turn: bool
    """Whether all nodes reply equally often."""
    largest_rate: float
    """The most replies of one node in a second."""
    discount: float = 1.0
    """The mean discount of stale updates."""
    most: float = inf
    """The largest weight of an update."""
    weight: float = 1.0
    """The mean weight of a reply."""
    usual: float = 0.0
    """By how much most replies move the model."""
    longest: float = inf
    """The most by which most replies have ever moved it; infinity: any length counts in full."""
    bounded_weight: float = 1.0
    """The mean weight of a reply where long updates count less."""

    def intervals_s(self, means: MeansOfNodes) -> Floats:
        """Return the mean times between the replies of some nodes; shape (num_nodes,)."""
        if self.in_turn:
            return np.ones(len(means.age_s))
        intervals_s = means.intervals_s(self.idle_s)
        if self.largest_rate < inf:
            return np.asarray(1 / np.minimum(1 / intervals_s, self.largest_rate))
        return intervals_s

    def bounds(self, lengths: Sequence[float]) -> Floats:
        """Return the largest weights of updates of these lengths; shape (len(lengths),)."""
        by_length = algorithm.weights_by_length(lengths, self.usual, self.longest)
        return np.minimum(self.most, by_length)


class RateCorrection:
    r"""Weights :math:`p_i^a \, r_i^{-b}`, which undo how often each node replies.

    Powers are (a, b), p a node's weight, r its rate.

    >>> RateCorrection((1.0, 0.0)).undoes_rate
    False
    """

    def __init__(self, powers: tuple[float, float]) -> None:
        self.powers = powers
        self.undoes_rate = powers[1] > 0
        # By node: the means of its replies, the time of the last one, and its update's length.
        self.means: dict[str, ReplyMeans] = {}
        self.last_reply_s: dict[str, float] = {}
        self.lengths: dict[str, float] = {}
        # The most by which most replies have moved the model, in weights of a mean reply.
        self.usual = 0.0
        # The longest time of a reply that was not the first one of its node.
        self._longest_s = 0.0
        self._num_replies = 0
        self._of_all = Figure[AllReplies]()

    def learn(
        self,
        node: str,
        weight: float,
        sent_s: float,
        arrived_s: float,
        discount: float,
        *,
        loads: bool = False,
    ) -> None:
        """Learn from a reply how long its node trained and rested, and what it counts.

        ``loads``: the first reply of a node contains the time in which it loads the app.
        """
        before_s = self.last_reply_s.get(node)
        idle_s = None if before_s is None else max(0.0, sent_s - before_s)
        self.last_reply_s[node] = arrived_s
        means = self.means.setdefault(node, ReplyMeans())
        age_s = arrived_s - sent_s
        if means.count:
            self._longest_s = max(self._longest_s, age_s)
        elif loads and self._longest_s:
            # A slow node loads the app for minutes, and its first update would weigh too much.
            age_s = min(age_s, self._longest_s)
        if loads and means.count == 1:
            # The time of the first reply no longer counts.
            means.age_s = max(age_s, SHORTEST_S)
        means.add(weight, age_s, idle_s, discount)
        self._num_replies += 1

    def weigh(
        self,
        nodes: Sequence[str],
        weights: Sequence[float],
        discounts: Floats,
        conditions: Conditions,
    ) -> Shares:
        """Weigh updates of these nodes, which it has seen."""
        of_all = self._of_all.of(
            lambda: self._look_at_all(conditions),
            self._num_replies,
            len(self.means),
            key=(conditions, bool(self.lengths)),
        )
        means = MeansOfNodes.of([self.means[node] for node in nodes])
        if self.undoes_rate:
            # Only what is staler than usual for its node is weighed down, or slow ones count less.
            discounts = np.asarray(of_all.discount * discounts / means.discount)
        weight_power, interval_power = self.powers
        intervals_s = of_all.intervals_s(means)
        raw = np.power(weights, weight_power) * np.power(intervals_s, interval_power)
        _, _, clipped_share = algorithm.update_weights(raw, of_all.weight, of_all.most)
        bounds = of_all.bounds([self.lengths.get(node, 0.0) for node in nodes])
        counted, step, cut_share = algorithm.update_weights(raw, of_all.bounded_weight, bounds)
        factors = counted / np.where(weights, weights, 1.0)
        bounded_share = cut_share - clipped_share
        return Shares(discounts, step, factors, clipped_share, bounded_share, of_all.discount)

    def _look_at_all(self, conditions: Conditions) -> AllReplies:
        """Return what is usual of the replies of all nodes."""
        means = MeansOfNodes.of(self.means.values())
        # Fast nodes rest longer than others, which tells nothing of a node with few replies.
        idle_s = means.idle_s[means.starts > 0]
        usual_idle_s = float(np.quantile(idle_s, USUAL_IDLE)) if len(idle_s) else 0.0
        largest_rate = inf
        if conditions.largest_share is not None and not conditions.in_turn:
            # A node that has just begun may seem faster than it can be.
            share = max(conditions.largest_share, NODE_LIMIT / len(self.means))
            largest_rate = algorithm.largest_rate(1 / means.intervals_s(usual_idle_s), share)
        of_all = AllReplies(usual_idle_s, conditions.in_turn, largest_rate)
        weight_power, interval_power = self.powers
        intervals_s = of_all.intervals_s(means)
        rates = 1 / intervals_s
        weights = means.weight**weight_power * intervals_s**interval_power
        most = algorithm.largest_weight(weights) if self.undoes_rate else inf
        of_all = of_all._replace(
            discount=float(np.average(means.discount, weights=rates)),
            most=most,
            weight=algorithm.mean_weight(weights, rates, most),
        )
        lengths = [self.lengths.get(node, 0.0) for node in self.means]
        if self.undoes_rate and self.lengths and conditions.bounds_lengths:
            # One step of a slow node counts for many, and would move the model at random.
            usual = algorithm.usual_contribution(weights, lengths, rates)
            # Intervals may become much shorter after a slow start, and all weights with them.
            unit = of_all.weight or 1.0
            if conditions.remembers:
                self.usual = max(self.usual, usual / unit)
            of_all = of_all._replace(usual=usual, longest=self.usual * unit)
        bounded_weight = algorithm.mean_weight(weights, rates, of_all.bounds(lengths))
        return of_all._replace(bounded_weight=bounded_weight)

    def to_str(self) -> str:
        """Write what it knows as JSON."""
        means = {node: asdict(each) for node, each in self.means.items()}
        return json.dumps([means, self.last_reply_s, self.lengths, self.usual, self._longest_s])

    def load_str(self, text: str) -> None:
        """Take up what :meth:`to_str` wrote."""
        means, self.last_reply_s, self.lengths, self.usual, *longest_s = json.loads(text)
        # Earlier versions did not save it.
        self._longest_s = max(longest_s, default=0.0)
        self.means = {node: ReplyMeans(**each) for node, each in means.items()}
        self._num_replies += len(means) + 1
