"""The context of hooks: an exchange with nodes, and below it what lasts for the run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from flwr_hetero.errors import clean
from flwr_hetero.records import Latency, payload_bytes, reported_latency
from flwr_hetero.server.arrivals import LATE_LIMIT, Arrivals, Judge
from flwr_hetero.server.nodes import NodeBook, is_simulated, online_nodes, whole_grid

Messages: TypeAlias = list[Message]
QUORUM = 3
"""Nodes that must have the same fault for it to be the app's: two cannot end a run."""
MOST_TEXT = 300
"""Characters of a reason, which may quote what the node wrote."""
EQUAL_S = 1.0
"""Latency of nodes that report none where the server sees none: in simulations above all."""
TRUSTED = 0.5
"""Least part of a round trip that a node may call its own time."""


@dataclass
class Exchange:
    """Instructions to nodes and their replies: the ``context`` of every hook."""

    fleet: Fleet
    round: int = 0
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    """The global model."""
    config: ConfigRecord = field(default_factory=ConfigRecord)
    timeout_s: float = inf
    enough: int | None = None
    """Number of replies to wait for; None: all."""
    messages: list[Message] = field(default_factory=list)
    simulated: bool = False
    overlaps: bool = False
    """Whether other exchanges are in flight, so that its silences are no news when it is over."""
    quorum: int = QUORUM
    """Nodes that must agree in a fault: fewer where there are no more."""
    # how long it took, by the fleet's clock; of single messages by their id
    virtual_s: float = 0.0
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """As the server saw it."""
    same_clock: bool = False
    """Whether round trips are by the clock of the nodes' reports: not in Flower's simulation."""
    latency: dict[str, Latency] = field(default_factory=dict)
    judge: Judge | None = None
    late_s: float = inf
    """How long others were waited for beside those that had answered; infinity: the time-out."""
    # what came back
    judged: dict[str, bool] = field(default_factory=dict)
    """Whether replies would be accepted by themselves, by message."""
    checked: dict[str, bool] = field(default_factory=dict)
    """Whether replies were found good on arrival, by message."""
    surplus: list[Message] = field(default_factory=list)
    """Instructions whose replies were not waited for."""
    counted: list[str] = field(default_factory=list)
    """Nodes whose replies went to the innermost strategy."""
    left_out: dict[str, Array] = field(default_factory=dict)
    """Arrays that most nodes do not return, with the value that they keep."""
    weights: dict[str, float] = field(default_factory=dict)
    """By what the models of these nodes were weighted."""
    shortened: dict[str, float] = field(default_factory=dict)
    """To what part of their length updates were cut, by node."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why nodes, by id, have no reply that counts."""
    refused: set[int] = field(default_factory=set)
    """Those of them that did answer."""
    _by_id: dict[str, Message] = field(default_factory=dict)

    def ask(self, messages: Sequence[Message], grid: Grid, judge: Judge | None = None) -> None:
        """Begin: only replies to these instructions are accepted."""
        self.messages, self.simulated, self.judge = list(messages), is_simulated(grid), judge
        nodes = [message.metadata.dst_node_id for message in messages]
        self.fleet.nodes.learn(grid, nodes)
        for kind in {message.metadata.message_type for message in messages}:
            self.fleet.asked[kind].update(nodes)
        if len(messages) < QUORUM:
            self.quorum = min(QUORUM, max(1, len(online_nodes(whole_grid(grid)))))

    def send(self, grid: Grid) -> list[Message]:
        """Send the instructions, wait for all or enough good replies, and advance the clock."""
        if not self.messages:
            return []
        whole: Any = whole_grid(grid)
        clock, emulated_s = self.fleet.clock, None
        is_local, start_s = hasattr(whole, "virtual_time_s"), time.monotonic()
        began_s = whole.virtual_time_s if is_local else start_s
        # by whose clock replies are judged
        self.same_clock = is_local or not self.simulated
        arrivals = Arrivals(self, whole)
        replies = arrived = arrivals.replies
        if is_local:
            arrivals.wait_locally(whole)
            # to the nanosecond, so that a resumed run, whose clock began later, counts the same
            self.virtual_s = round(float(whole.virtual_time_s) - began_s, 9)
        elif self.simulated:
            arrived = arrivals.poll_simulation(whole)
            self.virtual_s = time.monotonic() - start_s
            if (emulated_s := self._emulated_s(arrivals)) is not None:
                self.virtual_s = emulated_s
        else:
            arrivals.poll(whole)
            self.virtual_s = time.monotonic() - start_s
        arrivals.close()
        self.fleet.costs.sent(self.messages, clock.virtual_s, self.timeout_s)
        clock.virtual_s += self.virtual_s
        self.fleet.costs.answered(arrived, inf, self.round_trip_s if emulated_s is None else {})
        return replies

    def _emulated_s(self, arrivals: Arrivals) -> float | None:
        """Return how long it took on the devices' own clock; None if they have none."""
        latencies = [reported_latency(r) for r in arrivals.replies if r.has_content()]
        # TiFL, Eq. 1: a round is as long as its slowest node takes
        seconds = [latency.seconds for latency in latencies if latency and latency.emulated]
        if not (seconds or self.fleet.clock.emulated):
            return None
        if not arrivals.is_over():
            seconds.append(arrivals.limit_s())
        return min(max(seconds, default=0.0), self.timeout_s)

    def beside(self, timeout_s: float) -> Exchange:
        """Begin another exchange in the same round."""
        return Exchange(self.fleet, self.round, self.arrays, self.config, timeout_s)

    # --- what hooks ask ----------------------------------------------------------------
    def identity(self, node_id: int) -> str:
        """Return a node's stable identity: name, key, partition or id, in that order."""
        return self.fleet.nodes.identity(node_id)

    def instruction_of(self, reply: Message) -> Message:
        """Return the instruction that a reply answers: what the node was sent, model included."""
        # they have an id once they are sent
        if len(self._by_id) != len(self.messages):
            self._by_id = {message.metadata.message_id: message for message in self.messages}
        return self._by_id[reply.metadata.reply_to_message_id]

    def latency_of(self, reply: Message) -> Latency | None:
        """Return how long a node took for a good reply; None if that is unknown."""
        return self.latency.get(reply.metadata.reply_to_message_id)

    def comparable_s(self, reply: Message) -> float:
        """Return how long a node took, so that nodes can be compared by it."""
        latency = self.latency_of(reply)
        if self.same_clock and latency:
            seen_s = self.round_trip_s.get(reply.metadata.reply_to_message_id, 0.0)
            return max(latency.seconds, TRUSTED * seen_s)
        # a simulation's round trip holds the wait for a free worker: all are equally fast
        if latency is None or (latency.source == "observed" and self.simulated):
            return EQUAL_S
        return latency.seconds

    def failed_nodes(self) -> list[str]:
        """Return the identities of the nodes without a reply that counts."""
        return [self.identity(node_id) for node_id in self.failed]

    def believed(self, kind: str = MessageType.TRAIN) -> float:
        """Return how many nodes must agree in a fault for it to be the app's: most asked so far."""
        return max(self.quorum, self.fleet.num_asked(kind) / 2)

    # --- what does not count -----------------------------------------------------------
    def drop(self, reply: Message, reason: str) -> None:
        """Record that a good reply does not count."""
        self.fail(reply.metadata.src_node_id, reason, reply.metadata.reply_to_message_id)

    def fail(self, node_id: int, reason: str, message_id: str | None = None) -> None:
        """Record that a node has no reply that counts; ``message_id``: of what it did answer."""
        reason = clean(reason, MOST_TEXT)
        self.note(node_id, f"reply dropped: {reason}", reason)
        if message_id is not None:
            self.latency.pop(message_id, None)
            self.refused.add(node_id)
        self.failed[node_id] = reason

    def note(self, node_id: int, text: str, reason: str = "") -> None:
        """Log and record a failure; by itself it costs no reply."""
        self.fleet.nodes.warn(node_id, text)
        reason = clean(reason or text, MOST_TEXT)
        self.fleet.failures.append({"node": self.identity(node_id), "reason": reason})


# --- time and costs ----------------------------------------------------------------------
@dataclass
class Clock:
    """Time of the run by the fleet's clock: that of the devices where they are emulated."""

    virtual_s: float = 0.0
    emulated: bool = False
    """Whether a simulated node has reported an emulated time."""


@dataclass
class PendingCost:
    """An instruction in flight: when it was sent and is given up, and for how long it counts."""

    sent_s: float
    until_s: float
    counted_s: float = 0.0


@dataclass
class Costs:
    """Bytes on the links, and seconds for which nodes worked: at most from asking to the reply."""

    bytes_down: int = 0
    bytes_up: int = 0
    device_s: float = 0.0
    pending: dict[str, PendingCost] = field(default_factory=dict)
    on_wire: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of messages that travel in another form, by their id and the one that they answer."""

    def size(self, message: Message) -> int:
        """Return the bytes of a message that was sent."""
        ids = message.metadata.message_id, message.metadata.reply_to_message_id
        if (known := self.on_wire.pop(ids, None)) is not None:
            return known
        return payload_bytes(message.content) if message.has_content() else 0

    def sent(self, messages: Sequence[Message], now_s: float, timeout_s: float = inf) -> None:
        """Count instructions that are sent now, in Flower's sense: they have an id."""
        for message in messages:
            self.bytes_down += self.size(message)
            self.pending[message.metadata.message_id] = PendingCost(now_s, now_s + timeout_s)

    def answered(
        self, replies: Sequence[Message], now_s: float, trips_s: Mapping[str, float] | None = None
    ) -> None:
        """Count replies that are here now; at ``inf`` none is late by the devices' own clock."""
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            self.bytes_up += self.size(reply)
            if (job := self.pending.pop(message_id, None)) is None:
                continue
            took_s = (trips_s or {}).get(message_id, now_s - job.sent_s)
            if latency := reported_latency(reply) if reply.has_content() else None:
                took_s = min(took_s, latency.seconds)
            self.device_s += (took_s if took_s < inf else 0.0) - job.counted_s

    def until(self, now_s: float) -> dict[str, float]:
        """Return what was spent since this was last asked for; what is under way counts by now."""
        for job in self.pending.values():
            worked_s = max(job.counted_s, min(now_s, job.until_s) - job.sent_s)
            self.device_s += worked_s - job.counted_s
            job.counted_s = worked_s
        down, up, device_s = self.bytes_down, self.bytes_up, round(self.device_s, 9)
        self.bytes_down, self.bytes_up, self.device_s = 0, 0, 0.0
        return {"bytes_down": down, "bytes_up": up, "device_s": device_s}


# --- what lasts for the run --------------------------------------------------------------
@dataclass
class Standstill:
    """Exchanges in a row of which no reply has counted."""

    begun: bool = False
    """Whether one has counted before."""
    rounds: int = 0
    replies: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def add(self, failed: dict[int, str], refused: set[int]) -> None:
        """Count an exchange; a node's last failure is the one that is kept."""
        self.rounds, self.replies = self.rounds + 1, self.replies + len(failed)
        self.failed |= failed
        self.refused = self.refused - failed.keys() | refused


@dataclass
class Fleet:
    """What all wrappers around one strategy share for a run."""

    nodes: NodeBook = field(default_factory=NodeBook)
    clock: Clock = field(default_factory=Clock)
    costs: Costs = field(default_factory=Costs)
    stop_reason: str | None = None
    """Why the run ends after this round."""
    is_running: bool = False
    """Whether a call of ``start`` is in progress."""
    late_limit: float | None = LATE_LIMIT
    """After how many of the others' median times a node is late; None: after the time-out."""
    # --- of this round
    failures: list[dict[str, str]] = field(default_factory=list)
    """Replies that were dropped or corrected, or that never came."""
    by_node: dict[str, Any] = field(default_factory=dict)
    """How good the model is on each node."""
    reported: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By "train" or "evaluate" and metric what nodes said, as it counts; "limited": who was cut."""
    # --- of all replies so far, by which later ones are judged
    times_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By message type and node, the last ones at the end: how long its last good reply took."""
    asked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By message type: nodes that were asked so far."""
    metrics: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    """By message type and node, the last ones to answer: what was in its last reply."""
    usual_names: dict[str, str] = field(default_factory=dict)
    """By message type: digest of the names of metrics that were accepted last."""
    examples: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """By message type and node: how many examples it reported first, and how many counted last."""
    cut: set[str] = field(default_factory=set)
    """Nodes whose claims of examples were cut; "metrics of" those with values that were cut."""
    norms: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By node, the last ones at the end: of its update (parameters, statistics), and its steps."""
    most_usual: tuple[float, float, float] = (0.0, 0.0, 1.0)  # the longest median of the run
    left_out: dict[str, frozenset[str]] = field(default_factory=dict)  # of nodes' last replies
    first_arrays: dict[str, Array] | None = None
    """The model as it was at first, until most nodes that were asked have answered."""
    update_limit: float | None = 4.0
    standstill: dict[str, Standstill] = field(default_factory=lambda: defaultdict(Standstill))
    """Of "training" and of "evaluation"."""

    def begin_round(self) -> None:
        """Forget what the history gets of the round before."""
        self.failures, self.by_node, self.reported = [], {}, {}

    def num_asked(self, kind: str) -> int:
        """Return how many nodes were asked so far for a type; of a resumed run, have answered."""
        return len({*map(self.nodes.identity, self.asked[kind]), *self.examples.get(kind, ())})

    def is_early(self, known: int, kind: str) -> bool:
        """Return whether so many nodes are less than half of those that were asked."""
        return 2 * known < self.num_asked(kind)

    @property
    def begun(self) -> bool:
        """Whether a reply to training has counted."""
        return self.standstill["training"].begun
