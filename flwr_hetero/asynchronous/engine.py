"""Rounds that do not wait: nodes train all the time, and their updates are added as they come."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord

from flwr_hetero import keys
from flwr_hetero.exchange.checks import Expected, is_good
from flwr_hetero.exchange.context import (
    MOST_TIMED,
    QUORUM,
    Exchange,
    NoProgressError,
    check_progress,
    late_after_s,
)
from flwr_hetero.exchange.nodes import WAIT_S, GridView, is_simulated, wait_for_nodes, whole_grid
from flwr_hetero.exchange.queue import LOOK_S, MessageQueue, Pending, on_clock
from flwr_hetero.records import config_of
from flwr_hetero.server.loop import (
    Record,
    Run,
    aggregate,
    complete,
    evaluate_centrally,
    joined,
    keep_infos,
)

REST_S = 10.0
"""Seconds for which a node is backed off after a failure, doubled with each one in a row."""
AWAY_GROWTH = 4
"""Factor of the rest of a node that is away; its first rest is as long as its last job was."""
MAX_FAILURES = 6
"""Failures in a row of every node that end a run; 2 if no reply has counted yet."""
MANY_NODES = 1_000
"""Nodes of an emulated fleet above which others are looked for only if their number changes."""
HURRY = 0.3
"""Part of a round's time for which its evaluation is waited for, if another run is to follow."""
FRUITLESS = 2
"""Bad replies in a row, in nodes that train and from as many nodes, that end a run."""
EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate; of each node's if it is every round."""


class Update(NamedTuple):
    """A good reply to training, and when it arrived."""

    pending: Pending
    reply: Message
    arrived_s: float


class AsynchronousRounds:
    """Rounds of server updates, each of some nodes' updates, while all nodes go on.

    A rule (:class:`~flwr_hetero.asynchronous.strategy.Rule`) decides which nodes to ask, which
    updates to add, and when a round is over. On the same grid, from the arrays that the last run
    returned, a run continues with what is on its way.
    """

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.unit: str = rule.unit
        # The number of server updates, and of nodes at work after the last instructions.
        self.version = 0
        self.num_at_work = 0
        # Updates that wait to be added.
        self.waiting: list[Update] = []
        # The model at the end of the last run that training goes on with.
        self.newest = ArrayRecord()
        # The line of the present round, the number of its server updates, whether it is over, and
        # the metrics of its last server update.
        self._line: Record = {}
        self._num_updates = 0
        self._is_over = False
        self._metrics: MetricRecord | None = None
        # By node: the round in which it was asked last, and how often in that round.
        self._asked: dict[int, tuple[int, int]] = {}
        # By node, the latest at the end: how long its last good job took.
        self._took_s: dict[int, float] = {}
        # Nodes whose replies were bad since the last good one.
        self._bad: list[int] = []
        self._idle = IdleNodes()
        # The number of replies that have come and were not looked at.
        self._num_unread = 0
        # Instructions of which nothing came.
        self._lost: list[Message] = []

    def may_continue(self, run: Run) -> bool:
        """Return whether a run can take up what the last one has left."""
        is_same = run.arrays == self.run.result.arrays and self.queue.grid is whole_grid(run.grid)
        return run.round < 0 and is_same

    def begin(self, run: Run) -> None:
        """Begin a run, or take up what the last one has left."""
        self.run = run
        self.fleet = run.fleet
        self.book = run.fleet.nodes
        if run.continues:
            self.evaluations.run = run
            return
        self.queue = MessageQueue(run.grid, self.fleet.clock, self.fleet.costs)
        self.fleet.queue = self.queue
        self.evaluations: Evaluations = Evaluations(run, self.rule.evaluates_each_round)
        # An earlier run may have left some.
        self.book.failures["train"].clear()
        self._context = self._new_context([])
        self._updated_s = self.now_s
        # When the round began.
        self._began_s = self.now_s

    def end(self, run: Run) -> None:
        """Keep the newest model, with which another run may continue."""
        self.newest = run.arrays
        self.rule.engine = self
        # A run that ends early leaves evaluations of its own rounds.
        self.evaluations.in_flight.clear()

    @property
    def now_s(self) -> float:
        """Seconds on the fleet's clock."""
        return self.fleet.clock.virtual_s

    # --- a round -------------------------------------------------------------------------
    def next(self, run: Run) -> Record:
        """Update the model until a round is over, and evaluate it; return its line."""
        while not self._is_over:
            # Alg. 1, l. 6: when the buffer holds K updates
            while not (due := self.rule.due(self.waiting, self.num_at_work)):
                # l. 1 and 5: start idle nodes; l. 2: wait for an update
                self.start()
                self.receive(self.rule.wake_s)
            self.update(due)
        number = run.round + 1
        record = self._line | {"round": number}
        self._line = {}
        self._num_updates = 0
        self._is_over = False
        if self._metrics is not None:
            run.result.train_metrics_clientapp[number] = self._metrics
        record["global"] = evaluate_centrally(run, number)
        record["evaluate"] = self._evaluate(number)
        self._updated_s = self.now_s
        self._began_s = self.now_s
        complete(run, record)
        self.fleet.begin_round()
        return record

    def update(self, due: list[Update]) -> None:
        """Add updates to the model, and this server update to the line of the round."""
        due.sort(key=lambda update: update.arrived_s)
        context = self._take(due)
        refused_before = set(context.refused)
        asked = [update.pending.instruction for update in due] + self._lost
        self._lost = []
        self.rule.begin(due, self.version)
        record = aggregate(self.run, context, asked, [update.reply for update in due])
        # l. 7: t <- t + 1
        self.version += 1
        # Nodes whose updates were refused only now would fill the buffer again.
        for node_id in context.refused - refused_before:
            self._back_off(node_id, REST_S)
        self._updated_s = self.now_s
        self._line = joined_rounds(self._line, record, self._num_updates) if self._line else record
        self._num_updates += 1
        self._metrics = self.run.result.train_metrics_clientapp.get(context.round)
        self._is_over = self.rule.ends_round()
        keep_infos(self.run, self._line)
        # Models of the last server update and of the one before it need not stay in memory.
        self.rule.updates = {}
        self._context.arrays = self.run.arrays

    def _evaluate(self, number: int) -> Record:
        """Begin an evaluation if one is due; return the results of those that are over."""
        run = self.run
        evaluations = self.evaluations
        results = evaluations.results()
        if number == run.num_rounds:
            evaluations.begin(number, is_last=True)
            self._end_evaluation()
            return evaluations.results() or results
        if evaluations.is_due():
            evaluations.begin(number)
        return results

    def _end_evaluation(self) -> None:
        """Wait for the evaluation of the last model.

        If more runs are likely to follow, training goes on meanwhile, for a round at most. Then
        nodes that train for much longer are left out, for they would make every run wait.
        """
        run = self.run
        hurry_s = inf
        if run.continues:
            hurry_s = on_clock(self.now_s + HURRY * (self.now_s - self._began_s))
        run.final = run.strategy.evaluated_model(run.arrays)
        train_metrics = dict(run.result.train_metrics_clientapp)
        while not self.evaluations.is_over():
            trains = run.continues and not self._is_over
            self.start(trains=trains)
            late_s = self.evaluations.leave_out(self.queue.busy, self._took_s)
            if self.evaluations.is_over():
                break
            wake_s = min(late_s, self.rule.wake_s) if trains else late_s
            if self.now_s < hurry_s:
                wake_s = min(wake_s, hurry_s)
            self.receive(wake_s, judges=run.continues)
            if self.now_s >= hurry_s:
                self.evaluations.hurry()
            if trains and (due := self.rule.due(self.waiting, self.num_at_work)):
                self.update(due)
        run.result.train_metrics_clientapp = train_metrics

    # --- instructions --------------------------------------------------------------------
    def start(self, trains: bool = True) -> None:
        """Send instructions to idle nodes: first to those that evaluate, then to train."""
        busy = self.queue.busy.keys()
        backed_off = self.book.backed_off(self.now_s)
        idle = self._idle.nodes(self.queue.online(), busy, backed_off)
        messages: list[Message] = []
        free = idle
        num_training = len(busy)
        if not self.evaluations.is_over():
            self.evaluations.leave_out(self.queue.busy, self._took_s)
            messages = self.evaluations.messages_for(idle, busy)
            free = list(idle)
            for message in messages:
                del free[bisect_left(free, message.metadata.dst_node_id)]
            num_training += len(messages) - self.evaluations.num_open
        if trains and free:
            chosen = self.rule.next_nodes(free, num_training, self.waiting)
            messages += self._instructions(chosen)
        if messages:
            self.queue.send(messages, self.run.timeout_s, version=self.version, expires=True)
            # The clock of emulated devices has not moved: the rest is sent at the same time.
            if self.rule.unsent and self.queue.finds_emulated():
                self.start(trains)
        elif trains and not (self.queue.pending or backed_off):
            wait_for_nodes(self.run.grid, 1, WAIT_S)
            self.queue.online(is_new=True)
            if idle:
                raise RuntimeError(f"none of the {len(idle)} idle nodes is asked to train.")
        self.num_at_work = len(busy)

    def _instructions(self, chosen: list[int]) -> list[Message]:
        """Let the strategy write the instructions of the chosen nodes."""
        if not chosen:
            return []
        run = self.run
        number = run.round + 1
        view = GridView(run.grid, chosen)
        messages: list[Message] = run.strategy.configure_train(
            number, run.arrays, run.train_config, view, run.exchange(number)
        )
        # Flower's samples come in any order.
        sort_key = self.book.sort_key
        messages.sort(key=lambda message: sort_key(message.metadata.dst_node_id))
        # A node that is asked again in a round draws other samples.
        for message in messages:
            node_id = message.metadata.dst_node_id
            last_round, count = self._asked.get(node_id, (run.round, 0))
            repeat = count if last_round == run.round else 0
            if repeat:
                config_of(message)[keys.REPEAT] = repeat
            self._asked[node_id] = run.round, repeat + 1
        return messages

    # --- replies -------------------------------------------------------------------------
    def receive(self, wake_s: float = inf, judges: bool = True) -> None:
        """Wait for replies, at most until a time or until a node may be asked again."""
        back_s = self.book.back_s(self.now_s)
        if back_s == inf and not self.queue.is_simulated:
            back_s = self.now_s + LOOK_S
        if not self.queue.pending and min(wake_s, back_s) == inf:
            return
        answers = self.queue.next(min(wake_s, back_s))
        self._num_unread = len(answers)
        for pending, reply in answers:
            self._num_unread -= 1
            if pending.instruction.metadata.message_type == MessageType.EVALUATE:
                self.evaluations.receive(pending, reply)
            elif judges:
                self._judge(pending, reply)

    def _judge(self, pending: Pending, reply: Message | None) -> None:
        """Keep a good update; back off from a node without one."""
        node_id = pending.node_id
        # A reply is judged when it arrives, because a bad one must fill no place in the buffer.
        if reply is None or not self._is_good(pending, reply):
            self._lost.append(pending.instruction)
            self._fail(node_id, reply)
            return
        self._bad.clear()
        self.book.succeed(node_id)
        self._took_s.pop(node_id, None)
        self._took_s[node_id] = self.now_s - pending.sent_s
        self._context.messages.append(pending.instruction)
        update = Update(pending, reply, self.now_s)
        self.rule.arrived(update)
        self.waiting.append(update)

    def _is_good(self, pending: Pending, reply: Message) -> bool:
        context = self._context
        if self.queue.is_local or not self.fleet.clock.emulated:
            context.round_trip_s[pending.message_id] = self.now_s - pending.sent_s
        weight_key = getattr(self.run.strategy.leaf, "weighted_by_key", None)
        return is_good(context, reply, pending.node_id, Expected(self.run.arrays, weight_key))

    def _take(self, due: list[Update]) -> Exchange:
        """Take out updates that wait, as an exchange with the present model of their own."""
        context = self._context
        added = {update.pending.message_id for update in due}
        self.waiting = [each for each in self.waiting if each.pending.message_id not in added]
        rest = self._new_context([update.pending.instruction for update in self.waiting])
        # Without its round trip, a reply that waits would seem to have no fixed cost.
        for name in ("latency", "round_trip_s", "checked"):
            values = getattr(context, name).items()
            setattr(rest, name, {i: value for i, value in values if i not in added})
        self._context = rest
        context.latency = {i: value for i, value in context.latency.items() if i in added}
        context.messages = [update.pending.instruction for update in due]
        context.virtual_s = self.now_s - self._updated_s
        context.round = self.run.round + 1
        context.arrays = self.run.arrays
        return context

    def _new_context(self, messages: list[Message]) -> Exchange:
        context = self.run.exchange(self.run.round + 1)
        context.messages = messages
        context.overlaps = True
        context.simulated = self.queue.is_simulated
        context.same_clock = self.queue.is_local or not self.queue.is_simulated
        context.quorum = min(QUORUM, max(1, len(self.queue.online())))
        return context

    # --- failures ------------------------------------------------------------------------
    def _fail(self, node_id: int, reply: Message | None) -> None:
        """Back off from a node that has no reply, or a bad one."""
        if reply is None:
            # It was too slow and still trains, so that it is backed off for as long again.
            self._context.fail(node_id, f"no reply within {self.run.timeout_s:g} s")
            self._back_off(node_id, max(REST_S, self.run.timeout_s))
        elif reply.has_error():
            # A node that is away now and then, with short jobs, would rest most of the time.
            self._back_off(node_id, REST_S, self._took_s.get(node_id, inf))
        else:
            self._bad.append(node_id)
            self._back_off(node_id, REST_S)

    def _back_off(self, node_id: int, rest_s: float, away_s: float = inf) -> None:
        """Leave a node alone, longer with each failure in a row; end a run of failures."""
        self.rule.failed(node_id)
        num_before = min(self.book.fail(node_id), MAX_FAILURES) - 1
        rest_s = min(rest_s * 2**num_before, away_s * AWAY_GROWTH**num_before)
        self.book.back_off(node_id, self.now_s + rest_s)
        reasons = sorted({failure["reason"] for failure in self.fleet.failures})
        why = "; ".join(reasons[:3])
        least = max(self.num_at_work, self._context.believed())
        are_enough = len(self._bad) >= FRUITLESS * least and len(set(self._bad)) >= least
        if are_enough and self.fleet.begun:
            raise NoProgressError(f"{len(self._bad)} bad replies in a row: {why}.")
        # A few nodes that are asked first say nothing of the others.
        if self.queue.busy or self._num_unread or self.rule.unsent:
            return
        has_begun = self.fleet.begun or bool(self.waiting)
        if not has_begun and len(self._context.refused) == len(self.book.failures["train"]):
            check_progress(self._context)
        tries = MAX_FAILURES if has_begun else 2
        online = {self.book.identity(node) for node in self.queue.online(is_new=True)}
        if online <= self.book.failed_often(tries, "train"):
            raise NoProgressError(f"every node has failed {tries} times in a row: {why}.")


def joined_rounds(before: Record, after: Record, count: int) -> Record:
    """Put the lines of ``count`` updates of a round and of the next one together."""
    record: Record = joined(before, after)
    share = 1 / (count + 1)
    for name in ("train", "weights"):
        old = before[name]
        new = after[name]
        numbers = [key for key, value in (old | new).items() if not isinstance(value, list)]
        record[name] = {k: (1 - share) * old.get(k, 0.0) + share * new.get(k, 0.0) for k in numbers}
    return record


# --- which nodes are idle, and which of them evaluate -------------------------------------------


class IdleNodes:
    """The nodes that are online and have nothing to do.

    They are sorted by id, because what is known of identities differs after a resume. To sort all
    nodes for each reply would take too long in a large fleet.
    """

    def __init__(self) -> None:
        self._online: Set[int] = frozenset()
        self._num_online = 0
        self._out: set[int] = set()
        self._idle: list[int] = []

    def nodes(self, online: Set[int], busy: Set[int], backed_off: Set[int]) -> list[int]:
        """Return the nodes; the list must not be changed."""
        out = {*busy, *backed_off}
        is_same = online is self._online or len(online) == self._num_online > MANY_NODES
        if is_same and len(out ^ self._out) < len(online) // 10:
            for node in out - self._out:
                if is_among(self._idle, node):
                    del self._idle[bisect_left(self._idle, node)]
            for node in (self._out - out) & online:
                insort(self._idle, node)
        else:
            self._idle = sorted(online - out)
        self._online = online
        self._num_online = len(online)
        self._out = out
        return self._idle


@dataclass
class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    context: Exchange
    waiting: dict[int, Message]
    """By node: the instruction that it gets when it is idle."""
    open: dict[int, Message] = field(default_factory=dict)
    """By node: the instruction that was sent and that is waited for."""
    replies: list[Message] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.open


class Evaluations:
    """The evaluations in flight, the oldest first: of every round, or in a tenth of the time."""

    def __init__(self, run: Run, of_each_round: bool) -> None:
        self.run = run
        self.of_each_round = of_each_round
        self.in_flight: list[Evaluation] = []
        self.zero_s = self._now_s
        # When the last evaluation began, and when its last reply came.
        self.began_s = self._now_s
        self.ended_s = self._now_s
        # By node, the time that it has evaluated for in all, and in its last evaluation.
        self.took_s: dict[int, float] = defaultdict(float)
        self.last_s: dict[int, float] = {}

    @property
    def _now_s(self) -> float:
        return self.run.fleet.clock.virtual_s

    @property
    def num_open(self) -> int:
        """Nodes that are evaluating."""
        return sum(len(each.open) for each in self.in_flight)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return all(each.is_over() for each in self.in_flight)

    def is_due(self) -> bool:
        """Return whether a model that is there now is to be evaluated."""
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.of_each_round or (self.is_over() and self._now_s >= self.ended_s + pause_s)

    def begin(self, number: int, *, is_last: bool = False) -> None:
        """Ask the strategy which nodes evaluate the model of a round."""
        run = self.run
        context = run.exchange(number)
        model = run.strategy.evaluated_model(run.arrays)
        messages = run.strategy.configure_evaluate(
            number, model, run.evaluate_config, run.grid, context
        )
        # The exchange holds the messages that are sent, and none is sent yet.
        context.messages = []
        context.overlaps = True
        self.began_s = self._now_s
        # Only the last one begins before another is over.
        if not self.of_each_round:
            self.in_flight.clear()
        for older in self.in_flight:
            older.waiting = {} if older.context.messages else older.waiting
        waiting = {message.metadata.dst_node_id: message for message in messages}
        if self.of_each_round and not is_last:
            # A node that has evaluated for more than a tenth of the time is left out.
            most_s = EVALUATION_SHARE * (self._now_s - self.zero_s)
            most_s = max(most_s, min((self.took_s[node] for node in waiting), default=0.0))
            waiting = {node: m for node, m in waiting.items() if self.took_s[node] <= most_s}
        self.in_flight.append(Evaluation(context, waiting))

    def leave_out(self, busy: Mapping[int, float], train_s: dict[int, float]) -> float:
        """Give up nodes that are late beside the others; return when the next one will be.

        ``busy``: since when nodes are; ``train_s``: how long the last training of each took, the
        latest at the end.
        """
        fleet = self.run.fleet
        next_s = inf
        is_real = not is_simulated(self.run.grid)
        trains_s = late_after_s(latest(train_s), fleet.late_limit, is_real=is_real)
        lasts_s = late_after_s(latest(self.last_s), fleet.late_limit, is_real=is_real)
        for each in self.in_flight:
            for node, since_s in busy.items():
                if node in each.waiting:
                    late_s = on_clock(since_s + trains_s)
                elif node in each.open:
                    late_s = on_clock(since_s + lasts_s)
                else:
                    continue
                if late_s > self._now_s:
                    next_s = min(next_s, late_s)
                elif node in each.waiting:
                    del each.waiting[node]
                else:
                    del each.open[node]
                    each.context.late_s = lasts_s
        return next_s

    def hurry(self) -> None:
        """Wait for no node that still trains, if half of the nodes have been asked."""
        for each in self.in_flight:
            if len(each.context.messages) >= len(each.waiting):
                each.waiting.clear()

    def messages_for(self, idle: Sequence[int], busy: Set[int]) -> list[Message]:
        """Return the instructions for idle nodes, one for each, which are then in flight.

        ``idle`` is sorted. It is searched and not copied, since it may be a large fleet.
        """
        messages: dict[int, Message] = {}
        for each in self.in_flight:
            free = sorted(node for node in each.waiting if is_among(idle, node))
            sent = {node: each.waiting[node] for node in free if node not in messages}
            # Nodes that are gone, or backed off after a failure, are not waited for.
            kept = busy | messages.keys()
            each.waiting = {node: m for node, m in each.waiting.items() if node in kept}
            each.context.messages += sent.values()
            each.open |= sent
            messages |= sent
        return list(messages.values())

    def receive(self, pending: Pending, reply: Message | None) -> None:
        """Take a reply to an evaluation, or the lack of one."""
        took_s = self._now_s - pending.sent_s
        self.took_s[pending.node_id] += took_s
        # An error comes at once and tells nothing of how long others may take.
        if reply is not None and reply.has_content():
            self.last_s.pop(pending.node_id, None)
            self.last_s[pending.node_id] = took_s
        for each in self.in_flight:
            if each.open.get(pending.node_id) is pending.instruction:
                del each.open[pending.node_id]
                each.replies += [] if reply is None else [reply]
                self.ended_s = self._now_s

    def results(self) -> dict[str, Any]:
        """Return the figures of the newest evaluation that is over, of each once."""
        found: dict[str, Any] = {}
        for each in [each for each in self.in_flight if each.is_over()]:
            self.in_flight.remove(each)
            if not each.context.messages:
                continue
            number = each.context.round
            strategy = self.run.strategy
            metrics = strategy.aggregate_evaluate(number, each.replies, each.context)
            if metrics is not None:
                self.run.result.evaluate_metrics_clientapp[number] = metrics
                found = {**metrics, "evaluated_round": number}
        return found


def latest(times_s: dict[int, float]) -> list[float]:
    """Return the times that were added last."""
    return list(islice(reversed(times_s.values()), MOST_TIMED))


def is_among(nodes: Sequence[int], node: int) -> bool:
    """Return whether a node is among sorted ones."""
    place = bisect_left(nodes, node)
    return place < len(nodes) and nodes[place] == node
