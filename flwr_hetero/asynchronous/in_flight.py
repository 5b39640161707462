"""What is in flight on the fleet's clock: messages, and evaluations beside training."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.records import reported_latency
from flwr_hetero.server.arrivals import POLL_S, POLL_SHARE, late_after_s
from flwr_hetero.server.context import Clock, Costs, Exchange
from flwr_hetero.server.nodes import is_simulated, whole_grid
from flwr_hetero.server.rounds import Run

EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate; of each node's if it is every round."""
SIMULATION_POLL_S = 0.02
"""Seconds between two polls of Flower's simulation."""
LATE_S = 60.0
"""Seconds that a message outlives its time-out, so that a node given up is known to be slow."""


class Pending(NamedTuple):
    """An instruction in flight: when it was sent and is given up, and of which version."""

    instruction: Message
    sent_s: float
    until_s: float
    version: int = 0

    @property
    def node_id(self) -> int:
        """The node that it was sent to."""
        return self.instruction.metadata.dst_node_id

    @property
    def message_id(self) -> str:
        """The id that its reply names."""
        return self.instruction.metadata.message_id


Answer = tuple[Pending, Message | None]
"""An instruction and its reply; None if it was given up."""


class MessageQueue:
    """Send instructions at any time and get the replies one after the other.

    A ``LocalGrid`` has the clock; elsewhere time is the server's own, but where Flower's simulation
    emulates devices: the next reply on their clock is known when all pending ones have come.
    """

    def __init__(self, grid: Grid, clock: Clock, costs: Costs, timeout_s: float = inf) -> None:
        self.fleet: Any = whole_grid(grid)
        self.clock, self.costs, self.timeout_s = clock, costs, timeout_s
        self.is_local = hasattr(self.fleet, "virtual_time_s")
        self.is_simulated = is_simulated(grid)
        # A poll of a simulation costs next to nothing: its replies are in this process.
        self._pause_s = SIMULATION_POLL_S if self.is_simulated else POLL_S
        # the one that is given up first is the first
        self.pending: dict[str, Pending] = {}
        # given up: replies are collected and thrown away
        self._late: set[str] = set()
        # of emulated devices: arrival and reply
        self._held: dict[str, tuple[float, Message]] = {}
        # before the first reply of a simulation, its clock is unknown
        self._answered, self._next_poll_s = False, 0.0
        self._zero_s = clock.virtual_s - self._fleet_s()

    @property
    def shares_workers(self) -> bool:
        """Whether messages wait for free workers: in Flower's simulation of devices as they are."""
        return self.is_simulated and not self.is_local and not self.clock.emulated

    def finds_emulated(self) -> bool:
        """Wait for a first reply of a simulation; return whether its devices are emulated."""
        start_s = time.monotonic()
        while self.shares_workers and self.pending.keys() - self._held.keys():
            for reply in self._pull([*(self.pending.keys() - self._held.keys())]):
                self._hold(reply)
            # A device that is away answers with an error, which does not tell.
            has_content = any(reply.has_content() for _, reply in self._held.values())
            if has_content or time.monotonic() - start_s > self.timeout_s:
                break
            time.sleep(self._pause_s)
        return self.clock.emulated

    def send(self, messages: Sequence[Message], version: int = 0) -> None:
        """Send instructions; one that cannot be sent is given up when its time is over."""
        self._tick()
        if not self.is_simulated and self.timeout_s < inf:
            for message in messages:
                message.metadata.ttl = self.timeout_s + LATE_S
        list(self.fleet.push_messages(messages))
        now_s = self.clock.virtual_s
        self.costs.sent(messages, now_s, self.timeout_s)
        for message in messages:
            pending = Pending(message, now_s, on_clock(now_s + self.timeout_s), version)
            self.pending[pending.message_id] = pending

    def next(self, wake_s: float = inf) -> list[Answer]:
        """Wait for the next reply, or until a time; None for an instruction given up."""
        for first in self.pending.values():
            wake_s = min(wake_s, first.until_s)
            break
        if self.is_local:
            ids = self.pending.keys() | self._late if self._late else self.pending.keys()
            replies = self.fleet.wait_for_next(ids, wake_s - self._zero_s)
            self._tick()
        elif self.is_simulated and self._gather(wake_s):
            replies = self._next_held(wake_s)
        else:
            replies = self._poll(wake_s)
        self.costs.answered(replies, self.clock.virtual_s)
        answered = {reply.metadata.reply_to_message_id: reply for reply in replies}
        self._late -= answered.keys()
        arrived = [(self.pending.pop(i), answered[i]) for i in answered if i in self.pending]
        return [*arrived, *self._given_up()]

    def _given_up(self) -> Iterator[Answer]:
        """Give up what is pending for too long."""
        while self.pending:
            message_id, first = next(iter(self.pending.items()))
            if first.until_s > self.clock.virtual_s:
                return
            self._late.add(message_id)
            yield self.pending.pop(message_id), None

    def _fleet_s(self) -> float:
        return float(self.fleet.virtual_time_s) if self.is_local else time.monotonic()

    def _tick(self) -> None:
        """Set the run's clock, unless replies of emulated devices drive it."""
        unknown = self.is_simulated and not self._answered
        if self.is_local or not (self.clock.emulated or unknown):
            now_s = on_clock(self._zero_s + self._fleet_s())
            self.clock.virtual_s = max(self.clock.virtual_s, now_s)

    def _poll(self, wake_s: float) -> list[Message]:
        """Poll a fleet on the server's clock, until there is a reply or a time has come."""
        while True:
            # what a simulation holds was polled for a moment ago
            replies, self._held = [reply for _, reply in self._held.values()], {}
            replies = replies or self._pull([*self.pending, *self._late])
            self._tick()
            if replies or self.clock.virtual_s >= wake_s:
                return replies
            time.sleep(self._pause_s)

    def _pull(self, message_ids: list[str]) -> list[Message]:
        """Pull replies, no more often than is good for the server and a simulation's threads."""
        if not self.is_local:
            time.sleep(max(0.0, self._next_poll_s - time.monotonic()))
        start_s = time.monotonic()
        replies = list(self.fleet.pull_messages(message_ids))
        now_s = time.monotonic()
        # what a real node sends takes its time
        took_s = now_s - start_s if self.is_simulated or not replies else 0.0
        self._next_poll_s = now_s + took_s * (1 / POLL_SHARE - 1)
        return replies

    def _gather(self, wake_s: float) -> bool:
        """Hold all replies of a simulation; return False if its devices are not emulated."""
        start_s = time.monotonic()
        while missing := self.pending.keys() - self._held.keys():
            late = set() if self.clock.emulated else self._late
            for reply in self._pull([*missing, *late]):
                self._hold(reply)
            if self._answered and not self.clock.emulated:
                self._tick()
                if self._held or self.clock.virtual_s >= wake_s:
                    return False
            # a ClientApp that hangs is waited for on the server's clock
            if time.monotonic() - start_s > self.timeout_s:
                break
            if missing - self._held.keys():
                time.sleep(self._pause_s)
        return self.clock.emulated

    def _hold(self, reply: Message) -> None:
        latency = reported_latency(reply) if reply.has_content() else None
        took_s = latency.seconds if latency is not None and latency.emulated else 0.0
        self.clock.emulated |= latency is not None and latency.emulated
        self._answered, message_id = True, reply.metadata.reply_to_message_id
        sent_s = self.pending[message_id].sent_s if message_id in self.pending else 0.0
        self._held[message_id] = sent_s + took_s, reply

    def _next_held(self, wake_s: float) -> list[Message]:
        """Advance the clock to the next arrival on the devices' own clock."""
        now_s = max(self.clock.virtual_s, min([wake_s, *(at_s for at_s, _ in self._held.values())]))
        if now_s < inf:
            self.clock.virtual_s = now_s
        arrived = sorted((at_s, i) for i, (at_s, _) in self._held.items() if at_s <= now_s)
        return [self._held.pop(i)[1] for _, i in arrived]


def on_clock(seconds: float) -> float:
    """Round a time to what the clock shows, to the nanosecond."""
    # so that a resumed run, whose clock began later, counts the same, and none is missed
    return round(seconds, 9)


# --- evaluations ---------------------------------------------------------------------------


@dataclass
class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    context: Exchange
    waiting: dict[int, Message]
    num_open: int = 0
    replies: list[Message] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)
    """Nodes that are late beside the others."""

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.num_open


class Evaluations:
    """The evaluations in flight, the oldest first: of every round, or in a tenth of the time."""

    def __init__(self, run: Run, of_each_round: bool) -> None:
        self.run, self.of_each_round = run, of_each_round
        self.in_flight: list[Evaluation] = []
        self.began_s = self.ended_s = self.zero_s = self._now_s
        self.took_s: dict[int, float] = defaultdict(float)
        # of the last one of each node
        self.last_s: dict[int, float] = {}

    @property
    def _now_s(self) -> float:
        return self.run.fleet.clock.virtual_s

    @property
    def num_open(self) -> int:
        """Nodes that are evaluating."""
        return sum(each.num_open for each in self.in_flight)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return all(each.is_over() for each in self.in_flight)

    def is_due(self) -> bool:
        """Return whether a model that is there now is to be evaluated."""
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.of_each_round or (self.is_over() and self._now_s >= self.ended_s + pause_s)

    def begin(self, number: int, *, is_last: bool = False) -> None:
        """Ask the strategy which nodes evaluate the model of a round."""
        run, context = self.run, self.run.exchange(number)
        how = number, run.arrays, run.evaluate_config, run.grid
        messages = run.strategy.configure_evaluate(*how, context)
        context.messages, context.overlaps, self.began_s = [], True, self._now_s
        # only the last one begins before another is over
        if not self.of_each_round:
            self.in_flight.clear()
        for older in self.in_flight:
            older.waiting = {} if older.context.messages else older.waiting
        waiting = {message.metadata.dst_node_id: message for message in messages}
        if self.of_each_round and not is_last:
            # a node that has evaluated for more than a tenth of the time is left out
            most_s = EVALUATION_SHARE * (self._now_s - self.zero_s)
            most_s = max(most_s, min((self.took_s[node] for node in waiting), default=0.0))
            waiting = {node: m for node, m in waiting.items() if self.took_s[node] <= most_s}
        self.in_flight.append(Evaluation(context, waiting))

    def leave_out(self, busy: Mapping[int, float], train_s: Collection[float]) -> float:
        """Give up nodes that are late beside the others; return when the next one will be.

        ``busy``: since when nodes are; ``train_s``: how long the last training of each took.
        """
        fleet, next_s = self.run.fleet, inf
        is_real = not is_simulated(self.run.grid)
        trains_s = late_after_s(train_s, fleet.late_limit, is_real=is_real)
        lasts_s = late_after_s(self.last_s.values(), fleet.late_limit, is_real=is_real)
        for each in self.in_flight:
            asked = {message.metadata.dst_node_id for message in each.context.messages}
            answered = {reply.metadata.src_node_id for reply in each.replies}
            at_s = {n: on_clock(busy[n] + trains_s) for n in each.waiting if n in busy}
            at_s |= {n: on_clock(busy[n] + lasts_s) for n in asked - answered if n in busy}
            late = {node for node, late_s in at_s.items() if late_s <= self._now_s}
            each.waiting = {node: m for node, m in each.waiting.items() if node not in late}
            if left := (late & asked) - each.given_up:
                each.num_open -= len(left)
                each.context.late_s = lasts_s
            each.given_up |= late & asked
            next_s = min([next_s, *(late_s for node, late_s in at_s.items() if node not in late)])
        return next_s

    def messages_for(self, idle: Sequence[int], busy: Collection[int]) -> list[Message]:
        """Return the instructions for idle nodes, one for each, which are then in flight."""
        messages: list[Message] = []
        free, there = list(idle), {*idle, *busy}
        for each in self.in_flight:
            # nodes that are gone, or backed off after a failure, are not waited for
            each.waiting = {node: m for node, m in each.waiting.items() if node in there}
            own = [each.waiting.pop(node) for node in free if node in each.waiting]
            each.context.messages += own
            each.num_open += len(own)
            messages += own
            taken = {message.metadata.dst_node_id for message in own}
            free = [node for node in free if node not in taken]
        return messages

    def receive(self, pending: Pending, reply: Message | None) -> None:
        """Take a reply to an evaluation, or the lack of one."""
        took_s = self._now_s - pending.sent_s
        self.took_s[pending.node_id] += took_s
        # an error comes at once and tells nothing of how long others may take
        if reply is not None and reply.has_content():
            self.last_s[pending.node_id] = took_s
        for each in self.in_flight:
            is_open = pending.node_id not in each.given_up
            if is_open and any(m is pending.instruction for m in each.context.messages):
                each.num_open -= 1
                each.replies += [] if reply is None else [reply]
                self.ended_s = self._now_s

    def results(self) -> dict[str, Any]:
        """Return the figures of the newest evaluation that is over, of each once."""
        found: dict[str, Any] = {}
        for each in [each for each in self.in_flight if each.is_over()]:
            self.in_flight.remove(each)
            if not each.context.messages:
                continue
            number, strategy = each.context.round, self.run.strategy
            metrics = strategy.aggregate_evaluate(number, each.replies, each.context)
            if metrics is not None:
                self.run.result.evaluate_metrics_clientapp[number] = metrics
                found = {**metrics, "evaluated_round": number}
        return found
