"""An exchange with the nodes: what was sent, what came back, and how long that took."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.records import payload_bytes
from flwr_hetero.server.reply_checks import Latency, reported_latency

QUORUM = 3
"""Nodes that must have the same fault for it to be the app's: two cannot end a run."""
POLL_S = 0.1
"""Pause between two polls for replies, in seconds."""


@dataclass
class Exchange:
    """Instructions to nodes and what came back."""

    messages: list[Message] = field(default_factory=list)
    simulated: bool = False
    timeout_s: float = inf
    virtual_s: float = 0.0
    """How long it took by the fleet's clock."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """By message id, as the server saw it."""
    same_clock: bool = False
    """Whether round trips are by the clock of the nodes' reports: not in Flower's simulation."""
    latency: dict[str, Latency] = field(default_factory=dict)
    """By message id."""
    checked: set[str] = field(default_factory=set)
    """Message ids whose replies were found good on arrival."""
    surplus: list[Message] = field(default_factory=list)
    """Instructions whose replies were not waited for."""
    counted: list[str] = field(default_factory=list)
    """Nodes whose replies went to the innermost strategy."""
    failed: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Why the reply of a node, by id, does not count."""
    quorum: int = QUORUM
    """Nodes that must agree in a fault: fewer where there are no more."""

    _by_id: dict[str, Message] = field(default_factory=dict)

    def timed_as(self, sent: "Exchange") -> None:
        """Take the times of the exchange that sent these instructions."""
        self.timeout_s, self.virtual_s = sent.timeout_s, sent.virtual_s
        self.round_trip_s, self.same_clock = sent.round_trip_s, sent.same_clock

    @property
    def instructions(self) -> dict[str, Message]:
        """Instructions by message id; they have one once they are sent."""
        if len(self._by_id) != len(self.messages):
            self._by_id = {message.metadata.message_id: message for message in self.messages}
        return self._by_id


# --- what it costs -----------------------------------------------------------------------


@dataclass
class Clock:
    """Time of the run by the fleet's clock: that of the devices where they are emulated."""

    virtual_s: float = 0.0
    emulated: bool = False
    """Whether a simulated node has reported an emulated time."""


@dataclass
class Job:
    """An instruction under way: when it was sent and is given up, and for how long it counts."""

    sent_s: float
    until_s: float
    counted_s: float = 0.0


@dataclass
class Costs:
    """Bytes on the links, and seconds for which nodes were at work, whatever became of it.

    A node is at work from the instruction to the reply for as long as it says, at most; without
    a word of it all that time, and without a reply until the time-out.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    device_s: float = 0.0
    jobs: dict[str, Job] = field(default_factory=dict)

    def sent(self, messages: Sequence[Message], now_s: float, timeout_s: float = inf) -> None:
        """Count instructions that are sent now, in Flower's sense: they have an id."""
        for message in messages:
            self.bytes_down += payload_bytes(message.content)
            self.jobs[message.metadata.message_id] = Job(now_s, now_s + timeout_s)

    def answered(
        self, replies: Sequence[Message], now_s: float, trips_s: Mapping[str, float] | None = None
    ) -> None:
        """Count replies that are here now; at ``inf`` none is late by the devices' own clock."""
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if reply.has_content():
                self.bytes_up += payload_bytes(reply.content)
            if (job := self.jobs.pop(message_id, None)) is None:
                continue
            took_s = (trips_s or {}).get(message_id, now_s - job.sent_s)
            if latency := reported_latency(reply) if reply.has_content() else None:
                took_s = min(took_s, latency.seconds)
            self.device_s += (took_s if took_s < inf else 0.0) - job.counted_s

    def until(self, now_s: float) -> dict[str, float]:
        """Return what was spent since this was last asked for; what is under way counts by now."""
        for job in self.jobs.values():
            worked_s = max(job.counted_s, min(now_s, job.until_s) - job.sent_s)
            self.device_s += worked_s - job.counted_s
            job.counted_s = worked_s
        spent = {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}
        found = {**spent, "device_s": round(self.device_s, 9)}
        self.bytes_down = self.bytes_up = 0
        self.device_s = 0.0
        return found


# --- waiting for replies -------------------------------------------------------------------


def wait(
    grid: Grid, messages: Sequence[Message], timeout_s: float, enough: int | None
) -> tuple[list[Message], dict[str, float]]:
    """Poll for replies; return them and the round trip of each.

    A node that goes while it sends its reply holds a poll up, for 180 s at most. What others have
    sent meanwhile is fetched all the same: the last poll begins after the time-out.
    """
    start_s = time.monotonic()
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    replies: list[Message] = []
    round_trip_s: dict[str, float] = {}
    in_time = True
    while waiting and in_time and not is_enough(replies, enough):
        in_time = time.monotonic() - start_s < timeout_s
        arrived = list(grid.pull_messages(waiting))
        for reply in arrived:
            round_trip_s[reply.metadata.reply_to_message_id] = time.monotonic() - start_s
        replies += arrived
        waiting -= round_trip_s.keys()
        if waiting and not arrived and in_time:
            time.sleep(POLL_S)
    return replies, round_trip_s


def is_enough(replies: Sequence[Message], enough: int | None) -> bool:
    """Return whether so many replies are here, errors not counted."""
    return enough is not None and sum(reply.has_content() for reply in replies) >= enough


def first(replies: list[Message], enough: int | None) -> list[Message]:
    """Keep errors and the first ``enough`` replies on the devices' own clock."""
    if enough is None:
        return replies
    timed = [(reported_latency(r), r) for r in replies if r.has_content()]
    timed.sort(key=lambda pair: pair[0].seconds if pair[0] else inf)
    first = {id(reply) for _, reply in timed[:enough]}
    return [reply for reply in replies if reply.has_error() or id(reply) in first]


def emulated_s(
    replies: Sequence[Message], num_missing: int, timeout_s: float, *, known: bool
) -> float | None:
    """Length of an exchange on the devices' own clock (TiFL, Eq. 1); None if they have none.

    An error takes no time, as in LocalGrid.
    """
    latencies = [reported_latency(reply) for reply in replies if reply.has_content()]
    seconds = [latency.seconds for latency in latencies if latency and latency.emulated]
    if not seconds and not known:
        return None
    if num_missing:
        seconds.append(timeout_s)
    return min(max(seconds, default=0.0), timeout_s)
