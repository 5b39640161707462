"""The base of what runs without rounds: whom to ask, when to update, and by what weight."""

from collections.abc import Set
from math import inf
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import trains_trees
from flwr_hetero.asynchronous.algorithm import Shares, draw_nodes
from flwr_hetero.asynchronous.engine import Engine, Update, run_asynchronously
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import online_nodes
from flwr_hetero.server.rounds import Loop
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str


class Rule(Selection):
    """Keep nodes in flight and update the model as a rule says, which answers three questions."""

    name: ClassVar[str] = "fedbuff"  # of all rules: reports show the same of them
    decides = frozenset({"selection", "loop", "waiting"})
    count_argument = "concurrency"
    outside_of = frozenset({"steps"})
    unit = "server update"
    """What a round is called in the log."""
    evaluates_each_round = False
    """Whether nodes evaluate every round's model; else in a tenth of the time at most."""

    def __init__(
        self, strategy: Strategy | None = None, *, concurrency: int | None = None, seed: int = 0
    ) -> None:
        if concurrency is not None:
            check_count("concurrency", concurrency, 1)
        self.rng = np.random.default_rng(check_count("seed", seed))
        super().__init__(strategy)
        if trains_trees(self.leaf):
            rule = "average models: updates of trees cannot be added to a newer model"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        self.concurrency, self.version = concurrency, 0
        self.updates: dict[str, Update] = {}  # of this server update, by message
        self.engine: Engine | None = None  # of the last run, which may go on
        self._chosen: list[int] = []
        self._factors: dict[str, float] | None = None
        self._info: dict[str, Any] = {}

    # --- the three questions ---------------------------------------------------------------

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Return the idle nodes that start now: drawn uniformly, for as many as there is room."""
        room = len(idle) if self.concurrency is None else max(0, self.concurrency - in_flight)
        return draw_nodes(idle, room, self.rng)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the updates that are added to the model now; empty: none yet."""
        raise NotImplementedError

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Return what updates count; ``weights`` are those that the wrapped strategy gives."""
        raise NotImplementedError

    # --- what else a rule may say ----------------------------------------------------------

    @property
    def wake_s(self) -> float:
        """Until when to wait for the next reply at most, on the fleet's clock."""
        return inf

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model."""
        start = next(iter(update.pending.instruction.content.array_records.values()))
        if scale == 1.0 and update.pending.version == self.version:
            return reply
        return with_update(reply, start, context.arrays, scale)

    def ends_round(self) -> bool:
        """Return whether the server update that was just made is the last one of its round."""
        return True

    # --- what the engine asks ----------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """Without rounds."""
        return lambda run: run_asynchronously(run, self)

    def choose(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Choose the nodes that the wrapped strategy is shown."""
        self._chosen = self.next_nodes(idle, in_flight, waiting)
        return self._chosen

    def begin(self, due: list[Update], version: int) -> None:
        """Prepare a server update of the model of a version."""
        self.updates, self.version = {u.pending.message_id: u for u in due}, version
        self._info = {}

    # --- hooks -----------------------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Return the nodes that were chosen."""
        return [node for node in self._chosen if node in online]

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Show all nodes: they evaluate when they are idle next."""
        return sorted(online_nodes(grid)) if self._inner_evaluates else []

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add each update to the present model, as if all nodes had just trained on it."""
        if not replies:
            return replies
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        updates = [self.updates[message_id] for message_id in ids]
        shares = self.weigh(updates, super().weights(context, replies))
        # Alg. 1, l. 4 and 7: the wrapped strategy's mean of w + a(s) d_i is w + sum / K
        scales = (shares.step * shares.scales).tolist()
        self._factors = None
        if shares.factors is not None:
            self._factors = dict(zip(ids, shares.factors.tolist(), strict=True))
        added = [update for i, update in self.updates.items() if i in ids]
        self._info = {
            "nodes": [self.identity(update.pending.node_id) for update in added],
            "staleness": [self.version - update.pending.version for update in added],
            "age_s": [update.arrived_s - update.pending.sent_s for update in added],
            "step": shares.step,
            "clipped_share": shares.clipped_share,
        }
        moving = zip(updates, replies, scales, strict=True)
        return [self.moved(context, *each) for each in moving]

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Return by what the updates are weighted in their mean."""
        if self._factors is None:
            return [1.0] * len(replies)
        factors = [self._factors[reply.metadata.reply_to_message_id] for reply in replies]
        return [w * f for w, f in zip(super().weights(context, replies), factors, strict=True)]

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
        check_state(state, {"rng": str}, type(self).__name__)
        self.rng = rng_from_str(str(state["rng"]))
