"""A run without rounds: nodes stay in flight, and their updates are added as they come."""

from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp.strategy import Result

from flwr_hetero import keys
from flwr_hetero.asynchronous.in_flight import Evaluations, MessageQueue, Pending
from flwr_hetero.records import config_of
from flwr_hetero.server import rounds
from flwr_hetero.server.checks import Expected, is_good
from flwr_hetero.server.client_support import NoProgressError, check_progress
from flwr_hetero.server.context import QUORUM, Exchange
from flwr_hetero.server.nodes import WAIT_S, online_nodes, wait_for_nodes, whole_grid

REST_S = 10.0
"""Seconds for which a node is backed off after a failure, doubled with each one in a row."""
AWAY_GROWTH = 4
"""Factor of the rest of a node that is away; its first rest is as long as its last job was."""
MAX_FAILURES = 6
"""Failures in a row of every node that end a run; 2 if no reply has counted yet."""
FRUITLESS = 2
"""Bad replies in a row, in nodes in flight and from as many nodes, that end a run."""
LOOK_S = 10.0
"""Seconds between two looks at which nodes of a real fleet are online."""


class Update(NamedTuple):
    """A good reply to training, and when it arrived."""

    pending: Pending
    reply: Message
    arrived_s: float


class Engine:
    """Nodes in flight, updates that wait to be added, and evaluations beside them."""

    def __init__(self, run: rounds.Run, rule: Any) -> None:
        self.rule, self.fleet, self.book = rule, run.fleet, run.fleet.nodes
        self.queue = MessageQueue(run.grid, self.fleet.clock, self.fleet.costs)
        self.evaluations = Evaluations(run, rule.evaluates_each_round)
        # server updates made; nodes, once all that are to start have started
        self.version = self.in_flight = 0
        self.waiting: list[Update] = []
        # models of a run that is over
        self.newest = self.returned = ArrayRecord()
        # by node: in which round it was asked last and how often, and its last good job
        self._asked: dict[int, tuple[int, int]] = {}
        self._took_s: dict[int, float] = {}
        # nodes whose replies were bad since the last good one; messages that came to nothing
        self._bad: list[int] = []
        self._lost: list[Message] = []
        # of a run before, on another grid
        self.book.in_flight.clear()
        self.book.failures["train"].clear()
        self.take_up(run)
        self._context, self._updated_s = self._new_context([]), self.now_s

    def take_up(self, run: rounds.Run) -> None:
        """Go on in a run on the same grid."""
        self.run, self.evaluations.run, self.queue.timeout_s = run, run, run.timeout_s

    @property
    def now_s(self) -> float:
        """Seconds on the fleet's clock."""
        return self.fleet.clock.virtual_s

    def start(self, trains: bool = True) -> None:
        """Send instructions to idle nodes: first to those that evaluate, then to train."""
        busy, backed_off = self.book.in_flight.keys(), self.book.backed_off(self.now_s)
        # by id, for what is known of identities differs after a resume
        idle = sorted(online_nodes(self.run.grid) - busy - backed_off)
        messages, free, training = [], idle, len(busy)
        if self.evaluations.in_flight:
            self.evaluations.leave_out(self.book.in_flight, self._took_s.values())
            messages = self.evaluations.messages_for(idle, busy)
            evaluating = {message.metadata.dst_node_id for message in messages}
            free = [node for node in idle if node not in evaluating]
            training += len(messages) - self.evaluations.num_open
        self.rule.shares_workers = self.queue.shares_workers
        if trains and free:
            self.rule.chosen = self.rule.next_nodes(free, training, self.waiting)
            messages += self._instructions() if self.rule.chosen else []
        if messages:
            self.queue.send(messages, self.version)
            self.book.in_flight |= {m.metadata.dst_node_id: self.now_s for m in messages}
            # The clock of emulated devices has not moved: the rest is sent at the same time.
            if self.rule.unsent and self.queue.finds_emulated():
                self.start(trains)
        elif trains and not (self.queue.pending or backed_off):
            wait_for_nodes(self.run.grid, 1, WAIT_S)
            if idle:
                raise RuntimeError(f"none of the {len(idle)} idle nodes is asked to train.")
        self.in_flight = len(busy)

    def _instructions(self) -> list[Message]:
        run, number = self.run, self.run.round + 1
        how = number, run.arrays, run.train_config, run.grid
        messages: list[Message] = run.strategy.configure_train(*how, run.exchange(number))
        sort_key = self.book.sort_key  # Flower's samples come in any order
        messages.sort(key=lambda message: sort_key(message.metadata.dst_node_id))
        # a node that is asked again in a round draws other samples
        for message in messages:
            node_id = message.metadata.dst_node_id
            last, count = self._asked.get(node_id, (run.round, 0))
            if repeat := count if last == run.round else 0:
                config_of(message)[keys.REPEAT] = repeat
            self._asked[node_id] = run.round, repeat + 1
        return messages

    def receive(self, wake_s: float = inf, judges: bool = True) -> None:
        """Wait for replies, at most until a time or until a node may be asked again."""
        back_s = self.book.back_s(self.now_s)
        if back_s == inf and not self.queue.is_simulated:
            back_s = self.now_s + LOOK_S
        if not self.queue.pending and min(wake_s, back_s) == inf:
            return
        for pending, reply in self.queue.next(min(wake_s, back_s)):
            self.book.in_flight.pop(pending.node_id, None)
            if pending.instruction.metadata.message_type == MessageType.EVALUATE:
                self.evaluations.receive(pending, reply)
            elif not judges:
                continue
            elif reply is not None and self._is_good(pending, reply):
                self._bad.clear()
                self.book.succeed(pending.node_id)
                self._took_s[pending.node_id] = self.now_s - pending.sent_s
                self._context.messages.append(pending.instruction)
                update = Update(pending, reply, self.now_s)
                self.rule.arrived(update)
                self.waiting.append(update)
            else:
                self._lost.append(pending.instruction)
                self._fail(pending.node_id, reply)

    def _is_good(self, pending: Pending, reply: Message) -> bool:
        """Judge a reply when it arrives, for a bad one must fill no place in the buffer."""
        context = self._context
        if self.queue.is_local or not self.fleet.clock.emulated:
            context.round_trip_s[pending.message_id] = self.now_s - pending.sent_s
        weight_key = getattr(self.run.strategy.leaf, "weighted_by_key", None)
        return is_good(context, reply, pending.node_id, Expected(self.run.arrays, weight_key))

    def _fail(self, node_id: int, reply: Message | None) -> None:
        """Back off from a node that has no reply, or a bad one."""
        if reply is None:
            # it was too slow and is still in flight: backed off as long again
            self._context.fail(node_id, f"no reply within {self.run.timeout_s:g} s")
            self._back_off(node_id, max(REST_S, self.run.timeout_s))
        elif reply.has_error():
            # one that is away now and then, with short jobs, would rest most of the time
            self._back_off(node_id, REST_S, self._took_s.get(node_id, inf))
        else:
            self._bad.append(node_id)
            self._back_off(node_id, REST_S)

    def _back_off(self, node_id: int, rest_s: float, away_s: float = inf) -> None:
        """Leave a node alone, longer with each failure in a row; end a run of failures."""
        self.rule.failed(node_id)
        before = min(self.book.fail(node_id), MAX_FAILURES) - 1
        rest_s = min(rest_s * 2**before, away_s * AWAY_GROWTH**before)
        self.book.back_off(node_id, self.now_s + rest_s)
        reasons = sorted({failure["reason"] for failure in self.fleet.failures})
        least, why = max(self.in_flight, self._context.believed()), "; ".join(reasons[:3])
        enough = len(self._bad) >= FRUITLESS * least and len(set(self._bad)) >= least
        if enough and self.fleet.begun:
            raise NoProgressError(f"{len(self._bad)} bad replies in a row: {why}.")
        # A few nodes that are asked first say nothing of the others.
        if self.book.in_flight or self.rule.unsent:
            return
        begun, online = self.fleet.begun or bool(self.waiting), online_nodes(self.run.grid)
        if not begun and len(self._context.refused) == len(self.book.failures["train"]):
            check_progress(self._context)
        tries = MAX_FAILURES if begun else 2
        if {*map(self.book.identity, online)} <= self.book.failed_often(tries, "train"):
            raise NoProgressError(f"every node has failed {tries} times in a row: {why}.")

    def round(self) -> rounds.Record:
        """Update the model until a round is over, and evaluate it; return its line."""
        run, evaluations = self.run, self.evaluations
        record, count = self.update(), 1
        while not self.rule.ends_round():
            rounds.keep_infos(run, record)
            record, count = joined_rounds(record, self.update(), count), count + 1
        record["global"] = rounds.evaluate_centrally(run, number := record["round"])
        found = evaluations.results()
        if number == run.num_rounds:
            evaluations.begin(number, is_last=True)
            # others train on if more runs are likely to follow
            while not evaluations.is_over():
                self.start(trains=run.continues)
                late_s = evaluations.leave_out(self.book.in_flight, self._took_s.values())
                if not evaluations.is_over():
                    self.receive(late_s, judges=run.continues)
            found = evaluations.results() or found
        elif evaluations.is_due():
            evaluations.begin(number)
        record["evaluate"], self._updated_s = found, self.now_s
        rounds.complete(run, record)
        self.fleet.begin_round()
        return record

    def update(self) -> rounds.Record:
        """Wait until updates are due, and add them to the model; return the history's line."""
        # Alg. 1, l. 6: when the buffer holds K updates
        while not (due := self.rule.due(self.waiting, self.in_flight)):
            # l. 1 and 5: start idle nodes; l. 2: wait for an update
            self.start()
            self.receive(self.rule.wake_s)
        due.sort(key=lambda update: update.arrived_s)
        context, asked = self._take(due), [update.pending.instruction for update in due]
        before, asked, self._lost = set(context.refused), [*asked, *self._lost], []
        self.rule.begin(due, self.version)
        record = rounds.aggregate(self.run, context, asked, [update.reply for update in due])
        # l. 7: t <- t + 1
        self.version += 1
        # who was refused now would fill the buffer again
        for node_id in context.refused - before:
            self._back_off(node_id, REST_S)
        self._updated_s = self.now_s
        return record

    def _take(self, due: list[Update]) -> Exchange:
        """Take out updates that wait, as an exchange with the present model of their own."""
        now, added = self._context, {update.pending.message_id for update in due}
        self.waiting = [u for u in self.waiting if u.pending.message_id not in added]
        rest = self._context = self._new_context([u.pending.instruction for u in self.waiting])
        # without its round trip, a reply that waits would seem to have no fixed cost
        for name in ("latency", "round_trip_s", "checked"):
            known = getattr(now, name).items()
            setattr(rest, name, {i: value for i, value in known if i not in added})
        now.latency = {i: latency for i, latency in now.latency.items() if i in added}
        now.messages = [update.pending.instruction for update in due]
        now.virtual_s = self.now_s - self._updated_s
        now.round, now.arrays = self.run.round + 1, self.run.arrays
        return now

    def _new_context(self, messages: list[Message]) -> Exchange:
        context = self.run.exchange(self.run.round + 1)
        context.messages, context.overlaps = messages, True
        context.simulated = self.queue.is_simulated
        context.same_clock = self.queue.is_local or not self.queue.is_simulated
        context.quorum = min(QUORUM, max(1, len(online_nodes(self.run.grid))))
        return context


def run_asynchronously(run: rounds.Run, rule: Any) -> Result:
    """Keep nodes in flight and update the model until ``num_rounds`` rounds are over.

    On the same grid, from the arrays that the last run returned, what is in flight goes on.
    """
    engine, rule.engine = rule.engine, None
    if engine is not None and run.round < 0 and run.arrays == engine.returned:
        run.continues = engine.queue.fleet is whole_grid(run.grid)
    if run.continues:
        run.arrays = engine.newest
    with rounds.opened(run, rule.unit):
        if run.round < 0:
            rounds.record_start(run)
        engine = engine if run.continues else Engine(run, rule)
        engine.take_up(run)
        while run.round < run.num_rounds and run.fleet.stop_reason is None:
            rounds.finish_round(run, engine.round())
        engine.newest = run.arrays
    run.result.arrays = engine.returned = run.arrays
    rule.engine = engine
    return run.result


def joined_rounds(before: rounds.Record, after: rounds.Record, count: int) -> rounds.Record:
    """Put the lines of ``count`` updates of a round and of the next one together."""
    record: rounds.Record = rounds.joined(before, after)
    share = 1 / (count + 1)
    for name in ("train", "weights"):
        old, new = before[name], after[name]
        numbers = [key for key, value in (old | new).items() if not isinstance(value, list)]
        record[name] = {k: (1 - share) * old.get(k, 0.0) + share * new.get(k, 0.0) for k in numbers}
    return record
