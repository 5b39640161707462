"""A run without rounds: whom to ask, when to update the model, and by what weight."""

from collections.abc import Set
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_hetero._flwr import trains_trees
from flwr_hetero.asynchronous.algorithm import Shares, draw_nodes
from flwr_hetero.asynchronous.engine import Engine, Update
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server import rounds
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import online_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str


class Handover(NamedTuple):
    """What a run leaves to the next one: nodes in flight, the newest model, what it returned."""

    engine: Engine
    newest: ArrayRecord
    returned: ArrayRecord

    def fits(self, run: rounds.Run) -> bool:
        """Return whether a run begins where this one has ended."""
        here, there = run.arrays, self.returned
        is_same = here is there or (
            here.keys() == there.keys() and all(here[k].data == there[k].data for k in here)
        )
        return is_same and run.round < 0 and self.engine.is_on(run.grid)


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
        self.handover: Handover | None = None
        self._starting: list[int] = []
        self._factors: dict[str, float] | None = None
        self._info: dict[str, Any] = {}

    # --- the three questions ---------------------------------------------------------------

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Choose the idle nodes that start now: uniformly, for as many as there is room."""
        room = len(idle) if self.concurrency is None else max(0, self.concurrency - in_flight)
        return draw_nodes(idle, room, self.rng)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the updates that are added to the model now; empty: none yet."""
        raise NotImplementedError

    def weigh(self, context: Exchange, updates: list[Update], weights: list[float]) -> Shares:
        """Return what updates count; ``weights`` are those that the wrapped strategy gives."""
        raise NotImplementedError

    # --- what else a rule may say ----------------------------------------------------------

    @property
    def wake_s(self) -> float:
        """Until when to wait for the next reply at most, on the fleet's clock."""
        return inf

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""

    def begin(self, context: Exchange) -> None:
        """Prepare a server update: of ``updates``, to the model of ``version``."""

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model."""
        start = next(iter(update.pending.instruction.content.array_records.values()))
        if scale == 1.0 and update.pending.version == self.version:
            return reply
        return with_update(reply, start, context.arrays, scale)

    def ends_round(self, in_flight: int) -> bool:
        """Return whether the server update that was just made is the last one of its round."""
        return True

    # --- the loop --------------------------------------------------------------------------

    @property
    def loop(self) -> rounds.Loop:
        """Without rounds."""
        return self._run

    def _run(self, run: rounds.Run) -> Result:
        """Update the model until ``num_rounds`` rounds are over.

        On the same grid, from the arrays that the last run returned, what is in flight goes on.
        """
        before, self.handover = self.handover, None
        before = before if before and before.fits(run) else None
        if before:
            run.continues, run.arrays = True, before.newest
        with rounds.opened(run, self.unit):
            if run.round < 0:
                rounds.record_start(run)
            engine = before.engine if before else Engine(run, self.evaluates_each_round)
            engine.take_up(run)
            while run.round < run.num_rounds and run.fleet.stop_reason is None:
                rounds.finish_round(run, self._round(engine))
            newest = run.arrays
        run.result.arrays = run.arrays
        self.handover = Handover(engine, newest, run.arrays)
        return run.result

    def _round(self, engine: Engine) -> rounds.Record:
        """Update the model until a round is over; return its line for the history."""
        run, evaluations = engine.run, engine.evaluations
        record, count = self._update(engine), 1
        while not self.ends_round(engine.in_flight):
            rounds.keep_infos(run, record)
            record, count = rounds.joined_rounds(record, self._update(engine), count), count + 1
        number = record["round"]
        record["global"] = rounds.evaluate_centrally(run, number)
        found = evaluations.results()
        if number == run.num_rounds:
            evaluations.begin(number, is_last=True)
            while not evaluations.is_over():  # others train on if more runs are likely to follow
                engine.start(self._choose if run.continues else None)
                self._receive(engine, inf, judges=run.continues)
            found = evaluations.results() or found
        elif evaluations.is_due():
            evaluations.begin(number)
        return engine.complete(record, found)

    def _update(self, engine: Engine) -> rounds.Record:
        """Wait until updates are due, and add them to the model."""
        while not (due := self.due(engine.waiting, engine.in_flight)):  # Alg. 1, l. 6
            engine.start(self._choose)  # l. 1 and 5
            self._receive(engine, self.wake_s)  # l. 2
        due.sort(key=lambda update: update.arrived_s)
        context, self.version = engine.take(due), engine.version
        self.updates = {update.pending.message_id: update for update in due}
        self._info = {}
        self.begin(context)
        record, failed = engine.update(context, due)
        for node_id in failed:
            self.failed(node_id)
        return record

    def _choose(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        self._starting = self.next_nodes(idle, in_flight, waiting)
        return self._starting

    def _receive(self, engine: Engine, wake_s: float, *, judges: bool = True) -> None:
        for node_id in engine.receive(wake_s, judges=judges):
            self.failed(node_id)

    # --- hooks -----------------------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Return the nodes that were chosen."""
        return [node for node in self._starting if node in online]

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Show all nodes: they evaluate when they are idle next."""
        return sorted(online_nodes(grid)) if self._inner_evaluates else []

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Add each update to the present model, as if all nodes had just trained on it."""
        if not replies:
            return replies
        ids = [reply.metadata.reply_to_message_id for reply in replies]
        updates = [self.updates[message_id] for message_id in ids]
        shares = self.weigh(context, updates, super().weights(context, replies))
        # Alg. 1, l. 4 and 7: the wrapped strategy's mean of w + a(s) d_i is w + sum / K
        scales = (shares.step * shares.scales).tolist()
        self._factors = None
        if shares.factors is not None:
            self._factors = dict(zip(ids, shares.factors.tolist(), strict=True))
        self._info = self._facts(ids) | {
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

    def _facts(self, ids: list[str]) -> dict[str, Any]:
        """Return what the history says of these updates, in order of arrival."""
        added = [update for i, update in self.updates.items() if i in ids]
        return {
            "nodes": [self.identity(update.pending.node_id) for update in added],
            "staleness": [self.version - update.pending.version for update in added],
            "age_s": [update.arrived_s - update.pending.sent_s for update in added],
        }

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
