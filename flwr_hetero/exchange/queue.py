"""The queue of messages: the only place that sends messages, waits, and moves the clock on."""

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.exchange.nodes import is_simulated, online_nodes, whole_grid
from flwr_hetero.records import payload_bytes, reported_latency

POLL_S = 0.1
"""Pause between two polls of a real fleet, in seconds."""
SIMULATION_POLL_S = 0.02
"""Pause between two polls of Flower's simulation, whose replies are in this process."""
POLL_SHARE = 0.1
"""Largest part of the time that polls take, as a poll may be slow."""
LOOK_S = 10.0
"""Seconds between two looks at which nodes of a real fleet are online."""
LATE_S = 60.0
"""Seconds that a message outlives its time-out, so that a node given up is known to be slow."""


# --- the clock, and what messages cost -------------------------------------------------------
@dataclass
class Clock:
    """Time of the run, on the clock of the devices if these are emulated.

    Only a :class:`MessageQueue` moves it on.
    """

    virtual_s: float = 0.0
    emulated: bool = False
    """Whether a simulated node has reported an emulated time."""


@dataclass
class PendingCost:
    """An instruction without a reply: when it was sent, when it is given up, the time counted."""

    sent_s: float
    until_s: float
    counted_s: float = 0.0


@dataclass
class Costs:
    """Bytes on the links, and seconds for which nodes worked, at most until they replied."""

    bytes_down: int = 0
    bytes_up: int = 0
    device_s: float = 0.0
    pending: dict[str, PendingCost] = field(default_factory=dict)
    on_wire: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of messages in another form, by their id and the id that they answer."""

    def size(self, message: Message) -> int:
        """Return the bytes of a message that was sent."""
        ids = message.metadata.message_id, message.metadata.reply_to_message_id
        size = self.on_wire.pop(ids, None)
        if size is not None:
            return size
        return payload_bytes(message.content) if message.has_content() else 0

    def sent(self, messages: Sequence[Message], now_s: float, timeout_s: float = inf) -> None:
        """Count instructions that were sent now, so that they have an id."""
        for message in messages:
            self.bytes_down += self.size(message)
            self.pending[message.metadata.message_id] = PendingCost(now_s, now_s + timeout_s)

    def answered(self, replies: Sequence[Message], now_s: float) -> None:
        """Count replies that arrive now."""
        for reply in replies:
            self.bytes_up += self.size(reply)
            job = self.pending.pop(reply.metadata.reply_to_message_id, None)
            if job is None:
                continue
            took_s = now_s - job.sent_s
            latency = reported_latency(reply) if reply.has_content() else None
            if latency is not None:
                took_s = min(took_s, latency.seconds)
            self.device_s += took_s - job.counted_s

    def until(self, now_s: float) -> dict[str, float]:
        """Return the costs since the last call, including those of messages without a reply."""
        for job in self.pending.values():
            worked_s = max(job.counted_s, min(now_s, job.until_s) - job.sent_s)
            self.device_s += worked_s - job.counted_s
            job.counted_s = worked_s
        spent: dict[str, float] = {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}
        spent["device_s"] = round(self.device_s, 9)
        self.bytes_down = 0
        self.bytes_up = 0
        self.device_s = 0.0
        return spent


# --- the queue -------------------------------------------------------------------------------
class Pending(NamedTuple):
    """An instruction that was sent: when, until when it is waited for, and of which version."""

    instruction: Message
    sent_s: float
    until_s: float
    version: int = 0
    grid_s: float = 0.0
    """When it was sent by the grid's own clock, which is not rounded."""

    @property
    def node_id(self) -> int:
        """The node that it was sent to."""
        return self.instruction.metadata.dst_node_id

    @property
    def message_id(self) -> str:
        """The id that its reply names."""
        return self.instruction.metadata.message_id


Answer = tuple[Pending, Message | None]
"""An instruction and its reply; None if the instruction was given up."""


class MessageQueue:
    """Send instructions at any time, and get the replies one after the other.

    A ``LocalGrid`` has the clock. Elsewhere time is the server's own, except in a simulation by
    Flower that emulates devices. There the next reply on the devices' clock is known when the
    replies to all pending instructions have come.

    A message is in one of three books at most: ``pending``, whose reply :meth:`next` returns;
    ``_left``, whose reply :meth:`late` returns; and ``_given_up``, whose reply is thrown away.
    """

    def __init__(self, grid: Grid, clock: Clock, costs: Costs) -> None:
        self.grid: Any = whole_grid(grid)
        self.clock = clock
        self.costs = costs
        self.is_local = hasattr(self.grid, "virtual_time_s")
        self.is_simulated = is_simulated(grid)
        # The instruction that is given up first comes first.
        self.pending: dict[str, Pending] = {}
        # By node, since when it has had an instruction: the only book of who is at work.
        self.busy: dict[int, float] = {}
        self._left: dict[str, Pending] = {}
        self._given_up = set[str]()
        # Keys of instructions that could not be sent.
        self._unsent = set[str]()
        # Replies to what was left, until somebody asks for them.
        self._late: dict[str, Message] = {}
        # Replies of emulated devices, with the time of their arrival.
        self._held: dict[str, tuple[float, Message]] = {}
        # The clock of a simulation is unknown before its first reply.
        self._has_answered = False
        self._online: Set[int] = frozenset()
        self._next_look_s = -inf
        self._next_poll_s = 0.0
        self._timeout_s = inf
        self._zero_s = clock.virtual_s - self._grid_s()

    def online(self, *, is_new: bool = False) -> Set[int]:
        """Return the nodes that are online.

        The SuperLink sends the list of all nodes, so that a real fleet is looked at again after
        some seconds only, or if ``is_new`` is set.
        """
        if self.is_simulated or is_new or time.monotonic() >= self._next_look_s:
            self._online = online_nodes(self.grid)
            self._next_look_s = time.monotonic() + LOOK_S
        return self._online

    # --- what is sent ------------------------------------------------------------------
    def send(
        self,
        messages: Sequence[Message],
        timeout_s: float,
        *,
        version: int = 0,
        expires: bool = False,
    ) -> set[str]:
        """Send instructions; return the ids of those that were sent.

        An instruction that could not be sent is given up when its time is over. ``expires``: after
        that, the SuperLink no longer delivers an instruction.
        """
        self._tick()
        now_s = self.clock.virtual_s
        for message_id in [i for i, left in self._left.items() if left.until_s < now_s]:
            self.forget([message_id])
        if expires and not self.is_simulated and timeout_s < inf:
            for message in messages:
                message.metadata.ttl = timeout_s + LATE_S
        sent = {message_id for message_id in self.grid.push_messages(messages) if message_id}
        self._timeout_s = timeout_s
        for message in messages:
            job = Pending(message, now_s, on_clock(now_s + timeout_s), version, self._grid_s())
            key = job.message_id
            if key in sent:
                self.costs.sent([message], now_s, timeout_s)
            else:
                key = f"not sent to {job.node_id}"
                self._unsent.add(key)
            self.pending[key] = job
            self.busy[job.node_id] = now_s
        return sent

    def leave(self, message_ids: Iterable[str], until_s: float | None = None) -> None:
        """Let nobody wait for the replies to some instructions, which :meth:`late` returns.

        They are forgotten after a time, which is the end of their time-outs if it is None.
        """
        for message_id in message_ids:
            job = self.pending.pop(message_id, None) or self._left.get(message_id)
            if job is not None:
                self._left[message_id] = job if until_s is None else job._replace(until_s=until_s)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Take no more notice of the replies to some instructions."""
        for message_id in list(message_ids):
            job = self.pending.pop(message_id, None) or self._left.pop(message_id, None)
            if job is not None:
                self.busy.pop(job.node_id, None)
            self._late.pop(message_id, None)
            self._held.pop(message_id, None)
            self._unsent.discard(message_id)

    # --- what arrives ------------------------------------------------------------------
    def next(self, wake_s: float = inf) -> list[Answer]:
        """Wait for the next reply, or until a time; None stands for what is given up."""
        if self.pending:
            first = next(iter(self.pending.values()))
            wake_s = min(wake_s, first.until_s)
        replies = self._receive(wake_s)
        answered: dict[str, Message] = {}
        for reply in replies:
            # A second reply to an instruction does not count.
            answered.setdefault(reply.metadata.reply_to_message_id, reply)
        answers: list[Answer] = [
            (self.pending.pop(i), answered[i]) for i in answered if i in self.pending
        ]
        # While a slow poll went on, other nodes may have sent their replies in time.
        answers = answers or self._give_up()
        for job, _ in answers:
            self.busy.pop(job.node_id, None)
        return answers

    def late(self, message_ids: Set[str], wait_s: float = 0.0) -> list[Message]:
        """Return the replies to what was left; let time pass for the next one if none is here."""
        self.resume()
        wake_s = on_clock(self.clock.virtual_s + wait_s)
        if self.clock.emulated and not self.is_local:
            # All of them if one is waited for, else what is there.
            self._hold_all(
                lambda: (message_ids & self._left.keys()) - self._late.keys(), lambda: wait_s <= 0
            )
        is_over = False
        while not (here := [i for i in self._late if i in message_ids]) and not is_over:
            # A last look begins when the time is over.
            is_over = self.clock.virtual_s >= wake_s
            self._receive(wake_s)
        replies = [self._late.pop(message_id) for message_id in here]
        for message_id in here:
            if message_id in self._left:
                self.busy.pop(self._left.pop(message_id).node_id, None)
        return replies

    def put_aside(self, reply: Message) -> None:
        """Keep a reply that :meth:`next` returned and that does not count, for :meth:`late`."""
        self._late[reply.metadata.reply_to_message_id] = reply

    def _receive(self, wake_s: float) -> list[Message]:
        """Wait for replies, or until a time; put aside those that nobody waits for."""
        if self.is_local:
            found = self.grid.wait_for_next(self._open_ids(), wake_s - self._zero_s)
            self._tick()
        elif self.is_simulated and self._gather(wake_s):
            found = self._next_held(wake_s)
        else:
            found = self._poll(wake_s)
        self.costs.answered(found, self.clock.virtual_s)
        replies = []
        for reply in found:
            message_id = reply.metadata.reply_to_message_id
            if message_id in self._left:
                self._late[message_id] = reply
            else:
                replies.append(reply)
        self._given_up.difference_update(reply.metadata.reply_to_message_id for reply in replies)
        return replies

    def _open_ids(self) -> Set[str]:
        """Return the ids of all instructions that a reply may come to."""
        ids: Set[str] = self.pending.keys()
        if self._left or self._given_up:
            ids = ids | (self._left.keys() - self._late.keys()) | self._given_up
        return ids - self._unsent if self._unsent else ids

    def _give_up(self) -> list[Answer]:
        """Give up what is pending for too long."""
        over = []
        for message_id, job in self.pending.items():
            if job.until_s > self.clock.virtual_s:
                break
            over.append(message_id)
        self._given_up.update(i for i in over if i not in self._unsent)
        self._unsent.difference_update(over)
        return [(self.pending.pop(message_id), None) for message_id in over]

    # --- the clock ---------------------------------------------------------------------
    @property
    def shares_workers(self) -> bool:
        """Whether messages wait for free workers: in a simulation without emulated devices."""
        return self.is_simulated and not self.is_local and not self.clock.emulated

    def took_s(self, job: Pending) -> float:
        """Return how long ago an instruction was sent.

        A resumed run, whose clock began at another time, must find the same to the nanosecond.
        """
        if self.clock.emulated and not self.is_local:
            return self.clock.virtual_s - job.sent_s
        return on_clock(self._grid_s() - job.grid_s)

    def resume(self) -> None:
        """Let the clock go on from where it was when the last wait was over.

        What the server does between two waits is not counted.
        """
        self._zero_s = self.clock.virtual_s - self._grid_s()

    def set_clock(self, virtual_s: float) -> None:
        """Set the clock back, as if what happened since then had taken no time."""
        self.clock.virtual_s = virtual_s
        self._zero_s = virtual_s - self._grid_s()

    def _grid_s(self) -> float:
        return float(self.grid.virtual_time_s) if self.is_local else time.monotonic()

    def _tick(self) -> None:
        """Move the clock on, unless replies of emulated devices do."""
        is_unknown = self.is_simulated and not self._has_answered
        if self.is_local or not (self.clock.emulated or is_unknown):
            now_s = on_clock(self._zero_s + self._grid_s())
            self.clock.virtual_s = max(self.clock.virtual_s, now_s)

    # --- fleets on the server's clock ----------------------------------------------------
    def _poll(self, wake_s: float) -> list[Message]:
        """Poll a fleet until there is a reply or a time has come."""
        while True:
            # A node that goes while it sends its reply may hold a poll up for minutes. What others
            # have sent meanwhile is fetched by a last poll, which begins after that time.
            is_last = self.clock.virtual_s >= wake_s
            # A simulation was polled for what it holds a moment ago.
            replies = [reply for _, reply in self._held.values()]
            self._held.clear()
            replies = replies or self._pull(self._open_ids())
            self._tick()
            if replies or is_last:
                return replies
            time.sleep(SIMULATION_POLL_S if self.is_simulated else POLL_S)

    def _pull(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull replies, no more often than is good for the server and a simulation's threads."""
        time.sleep(max(0.0, self._next_poll_s - time.monotonic()))
        start_s = time.monotonic()
        replies = list(self.grid.pull_messages([*message_ids]))
        now_s = time.monotonic()
        # What a real node sends takes its time.
        took_s = now_s - start_s if self.is_simulated or not replies else 0.0
        self._next_poll_s = now_s + took_s * (1 / POLL_SHARE - 1)
        return replies

    # --- emulated devices in Flower's simulation -------------------------------------------
    def finds_emulated(self) -> bool:
        """Wait for a first reply of a simulation; return whether its devices are emulated."""

        def has_content() -> bool:
            # A device that is away answers with an error, which does not tell.
            return any(reply.has_content() for _, reply in self._held.values())

        if self.shares_workers:
            self._hold_all(self._pending_ids, has_content)
        return self.clock.emulated

    def _gather(self, wake_s: float) -> bool:
        """Hold all replies of a simulation; return False if its devices are not emulated."""

        def is_enough() -> bool:
            if self.clock.emulated or not self._has_answered:
                return False
            self._tick()
            return bool(self._held) or self.clock.virtual_s >= wake_s

        self._hold_all(self._pending_ids, is_enough)
        return self.clock.emulated

    def _pending_ids(self) -> Set[str]:
        return self.pending.keys() - self._unsent

    def _hold_all(self, wanted: Callable[[], Set[str]], is_enough: Callable[[], bool]) -> None:
        """Hold replies until all that are wanted are here, or enough of them.

        A ClientApp that hangs is waited for on the server's clock.
        """
        start_s = time.monotonic()
        while missing := wanted() - self._held.keys():
            # Only emulated devices keep what nobody waits for until its time has come.
            others = set() if self.clock.emulated else self._open_ids() - self.pending.keys()
            for reply in self._pull([*missing, *others - missing]):
                self._hold(reply)
            if is_enough() or time.monotonic() - start_s > self._timeout_s:
                return
            if missing - self._held.keys():
                time.sleep(SIMULATION_POLL_S)

    def _hold(self, reply: Message) -> None:
        """Hold a reply until it arrives on the devices' clock."""
        latency = reported_latency(reply) if reply.has_content() else None
        took_s = latency.seconds if latency is not None and latency.emulated else 0.0
        self.clock.emulated |= latency is not None and latency.emulated
        self._has_answered = True
        message_id = reply.metadata.reply_to_message_id
        job = self.pending.get(message_id) or self._left.get(message_id)
        sent_s = 0.0 if job is None else job.sent_s
        self._held[message_id] = sent_s + took_s, reply

    def _next_held(self, wake_s: float) -> list[Message]:
        """Move the clock on to the next arrival on the devices' clock."""
        next_s = min([wake_s, *(at_s for at_s, _ in self._held.values())])
        if next_s < inf:
            self.clock.virtual_s = max(self.clock.virtual_s, next_s)
        now_s = self.clock.virtual_s
        arrived = sorted((at_s, i) for i, (at_s, _) in self._held.items() if at_s <= now_s)
        return [self._held.pop(message_id)[1] for _, message_id in arrived]


def on_clock(seconds: float) -> float:
    """Round a time to what the clock shows, to the nanosecond.

    A resumed run, whose clock began later, then counts the same, and misses none of its times.
    """
    return round(seconds, 9)
