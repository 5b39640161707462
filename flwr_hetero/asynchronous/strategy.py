"""Strategies without rounds: the rule that each of them is, and FedBuff."""

from logging import WARNING
from math import inf
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.asynchronous import algorithm
from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Engine, Update, run_asynchronously
from flwr_hetero.asynchronous.rates import RateCorrection
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import arrays_in
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.composition import check_enough_updates, check_unscaled
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import GridView, online_nodes
from flwr_hetero.server.rounds import Loop
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict, rng_from_str, rng_to_str

POWERS = {"fair": (1.0, 1.0), "sqrt": (0.5, 0.5), "examples": (1.0, 0.0), "equal": (0.0, 0.0)}
"""Powers of the wrapped strategy's weight and of the interval between replies."""
KNOWN = 3
"""Replies of a node by which its rate is known: the first ones tell more of the run's start."""


class Rule(Selection):
    """Keep nodes in flight; a rule says which to ask, when to update the model, by what weight."""

    name: ClassVar[str] = "fedbuff"  # of all rules: reports show the same of them
    decides = frozenset({"selection", "loop", "waiting"})
    count_argument = "concurrency"
    outside_of = frozenset({"steps"})
    # what a round is called in the log
    unit = "server update"
    # whether nodes evaluate every round's model; else in a tenth of the time at most
    evaluates_each_round = False
    # largest share of a node in all updates, in even shares, and one in a server update; None: any
    node_limit: float | None = algorithm.NODE_LIMIT

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
        # idle nodes that were not asked
        self.resting, self._cost = 0, 0.0
        # whether messages wait for the workers of a simulation, and nodes that are asked later
        self.shares_workers = False
        self.unsent: list[int] = []
        # of this server update, by message
        self.updates: dict[str, Update] = {}
        # of the last run, which may go on
        self.engine: Engine | None = None
        self.chosen: list[int] = []
        self._factors: dict[str, float] | None = None
        self._info: dict[str, Any] = {}
        self._warned_clipped = False

    # --- the rule: override these ----------------------------------------------

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Return the idle nodes that start now: drawn uniformly, for as many as there is room.

        A node rests while an update of it waits, and while it is ahead of its share.
        """
        there = len(idle)
        room = self.room(there, in_flight)
        # turns that an instruction costs
        cost = min(self.concurrency or inf, in_flight + there) / (self.node_limit or inf)
        self._cost = cost
        # if nobody else is there, all go on
        if in_flight and self.node_limit:
            held = {update.pending.node_id for update in waiting}
            free = [node for node in idle if node not in held]
            idle = [node for node in free if self.turns.may_go(self.identity(node), cost)]
        chosen = self.draw(idle, room)
        self.turns.take([self.identity(node) for node in chosen], cost)
        self.resting = there - len(chosen)
        return chosen

    def room(self, num_idle: int, in_flight: int) -> int:
        """Return how many of the idle nodes may start."""
        return num_idle if self.concurrency is None else max(0, self.concurrency - in_flight)

    def draw(self, idle: list[int], room: int) -> list[int]:
        """Draw as many of the nodes that may start as there is room for."""
        return algorithm.draw_nodes(idle, room, self.rng)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the updates that are added to the model now; empty: none yet."""
        raise NotImplementedError

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Return what updates count; ``weights`` are those that the wrapped strategy gives."""
        raise NotImplementedError

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model."""
        start = next(iter(arrays_in(update.pending.instruction.content).values()))
        if scale == 1.0 and update.pending.version == self.version:
            return reply
        return with_update(reply, start, context.arrays, scale)

    def knows_rates(self, updates: list[Update]) -> bool:
        """Return whether the nodes of updates have replied often enough to know how often."""
        return True

    def ends_round(self) -> bool:
        """Return whether the server update that was just made is the last one of its round."""
        return True

    def arrived(self, update: Update) -> None:
        """Learn that a node has a good reply."""

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""
        self.turns.give_back(self.identity(node_id), self._cost)

    @property
    def wake_s(self) -> float:
        """Until when to wait for the next reply at most, on the fleet's clock."""
        return inf

    # --- what the engine asks --------------------------------------------------

    @property
    def loop(self) -> Loop:
        """Without rounds."""
        if self.node_limit is not None:
            check_number("node_limit", self.node_limit, "[1, inf)", "or None, for no limit")
        return lambda run: run_asynchronously(run, self)

    def begin(self, due: list[Update], version: int) -> None:
        """Prepare a server update of the model of a version."""
        self.updates, self.version = {u.pending.message_id: u for u in due}, version
        self._info = {}

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Show the nodes that were chosen."""
        return GridView(grid, self.chosen)

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Show all nodes: they evaluate when they are idle next."""
        return GridView(grid, sorted(online_nodes(grid)) if self._inner_evaluates else [])

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add each update to the present model, as if all nodes had just trained on it."""
        if not replies:
            return replies
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        updates = [self.updates[message_id] for message_id in ids]
        shares = self.weigh(updates, super().weights(context, replies))
        if shares.clipped_share and not self._warned_clipped and self.knows_rates(updates):
            self._warned_clipped = True
            text = "%s clipped %.0f %% of an update's weight. A node that replies far less often "
            text += "than the others is weighted up, at most twofold (see clipped_share)"
            log(WARNING, text, self.called or type(self).__name__, 100 * shares.clipped_share)
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
            # a round of FedSlice has several server updates
            "clipped_share": [shares.clipped_share],
            "bounded_share": [shares.bounded_share],
        }
        return [self.moved(context, *each) for each in zip(updates, replies, scales, strict=True)]

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Return by what the updates are weighted in their mean."""
        if self._factors is None:
            return [1.0] * len(replies)
        weights = zip(replies, super().weights(context, replies), strict=True)
        return [w * self._factors[reply.metadata.reply_to_message_id] for reply, w in weights]

    def on_train_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Learn nothing of rounds."""

    def round_info(self) -> dict[str, Any]:
        """Return the updates that were added in order of arrival, with staleness and age."""
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

    No round waits for its slowest node; ``num_rounds`` of ``start`` counts server updates. Nguyen
    et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022. ValueError
    for a setting out of range, or a strategy that selects nodes, trains trees or needs rounds.

    >>> paper = FedBuff(concurrency=100, buffer_size=10, weighting="equal")

    Parameters
    ----------
    strategy : Strategy, optional
        What averages the updates: any that derives from FedAvg, or a wrapper; FedAvg if left out.
    concurrency, buffer_size : int, optional
        Nodes in flight, drawn uniformly from the idle ones; None: all online. Updates K in a
        server update; None: half of the nodes in flight, at least 3.
    staleness : {"sqrt", "none"} or float
        Weight of an update that started s server updates ago: 1 / sqrt(1 + s), 1, or with the
        exponent of 1 / (1 + s).
    weighting : {"fair", "sqrt", "examples", "equal"}
        ``fair``: as the wrapped strategy weights (by examples), times the node's mean seconds
        between two replies. ``sqrt``: the root of that. ``examples``: as the wrapped strategy
        weights. ``equal``: the paper's rule.
    rate_correction : float, optional
        Power in [0, 1] with which a node's reporting rate is undone, in place of ``weighting``'s.
        Where it is, no update counts more than twice what a tenth of the nodes reach.
    seed : int
        Of the draw of nodes.

    Notes
    -----
    A server update has one update of a node at most, and of five and more nodes it waits for all
    but one at most, so that none can hold it up. No node sends more than :attr:`node_limit`
    (1.5) even shares of all updates: it rests meanwhile. None is the paper's rule, without a limit.

    A node whose reply is bad or does not come is backed off, longer each time; a run ends when all
    have failed six times in a row. Nodes evaluate when they are idle next, in a tenth of the time
    at most, and at the end. After a resume what was in flight is asked with the newest model.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        buffer_size: int | None = None,
        staleness: str | float = "sqrt",
        weighting: str = "fair",
        rate_correction: float | None = None,
        seed: int = 0,
    ) -> None:
        if buffer_size is not None:
            check_count("buffer_size", buffer_size, 1)
        self.staleness = staleness
        self.exponent = algorithm.staleness_exponent(staleness)
        powers = POWERS[check_choice("weighting", weighting, tuple(POWERS))]
        if rate_correction is not None:
            powers = powers[0], check_number("rate_correction", rate_correction, "[0, 1]")
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, buffer_size, "buffer_size")
        self.rates = RateCorrection(powers)
        if self.rates.undoes_rate:
            name = "weighting" if rate_correction is None else "rate_correction"
            check_unscaled(self, name, weighting if rate_correction is None else rate_correction)
        self.buffer_size = buffer_size
        self.weighting = weighting
        self.rate_correction = rate_correction

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the first K updates when there are as many."""
        there = in_flight + self.resting
        # others evaluate
        size = self.size_of(there)
        if self.node_limit is None:
            return algorithm.full_buffer(waiting, size)
        # one of each node
        first = {update.pending.node_id: update for update in reversed(waiting)}
        ready = [update for update in waiting if first[update.pending.node_id] is update]
        return algorithm.full_buffer(ready, max(1, min(size, most_at_once(there))))

    def size_of(self, nodes: int) -> int:
        """Return K for so many nodes."""
        return self.buffer_size or self.default_size(min(self.concurrency or nodes, nodes))

    def check_nodes(self, nodes: int) -> None:
        """Refuse too few nodes, or else too small a buffer, for a strategy that distrusts some."""
        if self.node_limit is not None:
            name = "the number of nodes"
            check_enough_updates(self.leaf, nodes, name, most_at_once, ": start more nodes")
        size = self.size_of(nodes)
        hint = f", and buffer_size is {size} where it is not given"
        check_enough_updates(self.leaf, size, "buffer_size", hint=hint)

    def default_size(self, in_flight: int) -> int:
        """Return K where it is not given."""
        return algorithm.default_buffer(in_flight)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh stale updates down, and by default let no node count by its speed."""
        started = [update.pending.version for update in updates]
        discounts = algorithm.staleness_weights(started, self.version, self.exponent)
        if self.rates.powers == POWERS["equal"]:
            return Shares(discounts)
        self.rates.largest_share = 1 / self._cost if self._cost else None
        nodes = [self.identity(update.pending.node_id) for update in updates]
        replies = zip(nodes, weights, updates, discounts.tolist(), strict=True)
        for node, weight, update, discount in replies:
            self.rates.learn(node, weight, update.pending.sent_s, update.arrived_s, discount)
        return self.rates.weigh(nodes, weights, discounts)

    def knows_rates(self, updates: list[Update]) -> bool:
        """Return whether the nodes of updates have replied often enough to know how often."""
        nodes = [self.identity(update.pending.node_id) for update in updates]
        return all(
            self.rates.means[node].count >= KNOWN for node in nodes if node in self.rates.means
        )

    def state_dict(self) -> StateDict:
        """Return the generator's state, and what is known of the nodes' replies."""
        return super().state_dict() | {"rates": self.rates.to_str()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.rates.load_str(str(state["rates"]))


def most_at_once(nodes: int) -> int:
    """Return of how many nodes a server update may be: of five and more one is not waited for."""
    return min(nodes, max(4, nodes - 1))
