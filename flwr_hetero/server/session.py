"""What all wrappers around one strategy share: nodes, model, clock, and the exchange going on."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import log
from flwr_hetero.server.nodes import NodeRegistry, is_simulated, online_nodes, whole_grid
from flwr_hetero.server.reply_checks import (
    Expected,
    Latency,
    drop_private_metrics,
    judge_latency,
    metric_names,
    reported_latency,
    reported_partition,
    usual_metrics,
    weight_of,
    why_bad,
)

QUORUM = 3
"""Nodes that must have the same fault for it to be the app's: two cannot end a run."""
POLL_S = 0.1
"""Pause between two polls for replies, in seconds."""


class Failure(NamedTuple):
    """A reply that was dropped or corrected, or that never came."""

    node: str
    reason: str


@dataclass
class Clock:
    """Time of the run by the fleet's clock: that of the devices where they are emulated."""

    virtual_s: float = 0.0
    emulated: bool = False
    """Whether a simulated node has reported an emulated time."""


@dataclass
class Exchange:
    """Instructions to nodes and what came back."""

    messages: list[Message] = field(default_factory=list)
    simulated: bool = False
    timeout_s: float = inf
    virtual_s: float = 0.0
    """How long it took by the fleet's clock."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """By message id, as the server saw it; empty where time is emulated."""
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

    @property
    def instructions(self) -> dict[str, Message]:
        """Instructions by message id; they have one once they are sent."""
        if len(self._by_id) != len(self.messages):
            self._by_id = {message.metadata.message_id: message for message in self.messages}
        return self._by_id


@dataclass
class RoundInfo:
    """What the history gets of a round, beside the metrics."""

    failures: list[Failure] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    by_node: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """Shared by all wrappers of one composition; the outermost one fills it.

    ``enough`` is the number of replies to wait for (None: all), ``stop_reason`` ends the run
    after the round, ``accepted`` counts the sets of metric names seen, by message type.
    ``refused`` has, by "training" or "evaluation", why replies of nodes have not counted since one
    last did, ``counting`` where one has.
    """

    registry: NodeRegistry = field(default_factory=NodeRegistry)
    clock: Clock = field(default_factory=Clock)
    exchange: Exchange = field(default_factory=Exchange)
    info: RoundInfo = field(default_factory=RoundInfo)
    arrays: ArrayRecord | None = None
    config: ConfigRecord | None = None
    enough: int | None = None
    stop_reason: str | None = None
    accepted: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, dict[int, str]] = field(default_factory=dict)
    counting: set[str] = field(default_factory=set)

    @property
    def begun(self) -> bool:
        """Whether a reply to training has counted."""
        return "training" in self.counting

    # --- out -------------------------------------------------------------------------

    def begin_round(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Begin a round with the global model and the run's training config."""
        self.info = RoundInfo()
        self.arrays, self.config = arrays, config

    def ask(self, messages: Sequence[Message], grid: Grid) -> None:
        """Begin an exchange: only replies to these instructions are accepted."""
        self.exchange = Exchange(list(messages), is_simulated(grid))
        if len(messages) < QUORUM:
            self.exchange.quorum = min(QUORUM, max(1, len(online_nodes(whole_grid(grid)))))

    def send(self, grid: Grid, messages: Sequence[Message], timeout_s: float) -> list[Message]:
        """Send instructions, wait for all or enough replies, and advance the clock."""
        now = self.exchange
        fleet: Any = whole_grid(grid)
        now.timeout_s = timeout_s
        if not messages:
            return []
        start_s = time.monotonic()
        if hasattr(fleet, "virtual_time_s"):
            began_s = fleet.virtual_time_s
            replies: list[Message] = fleet.wait_for(
                fleet.push_messages(messages), timeout_s, self.enough
            )
            # to the nanosecond, so that a resumed run, whose clock began later, counts the same
            now.virtual_s = round(float(fleet.virtual_time_s) - began_s, 9)
        elif is_simulated(fleet):  # the first replies are those first on the devices' clock
            replies, now.round_trip_s = _wait(fleet, messages, timeout_s, None)
            num_missing = 0 if _is_enough(replies, self.enough) else len(messages) - len(replies)
            replies = _first(replies, self.enough)
            emulated_s = _emulated_s(replies, num_missing, timeout_s, known=self.clock.emulated)
            now.virtual_s = time.monotonic() - start_s if emulated_s is None else emulated_s
        else:
            replies, now.round_trip_s = _wait(fleet, messages, timeout_s, self.enough)
            now.virtual_s = time.monotonic() - start_s
        self.clock.virtual_s += now.virtual_s
        return replies

    # --- in --------------------------------------------------------------------------

    def accept(self, replies: Sequence[Message], expected: Expected) -> list[Message]:
        """Return the good replies, sorted by node identity; record the others as failures."""
        now, good = self.exchange, []
        waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in now.messages}
        for reply in replies:
            node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:
                self.note(reply.metadata.src_node_id, "reply to a message that is not open")
            elif self.is_good(reply, node_id, expected):
                good.append(reply)
        if self.enough is not None and _is_enough(replies, self.enough):
            now.surplus = [m for m in now.messages if m.metadata.message_id in waiting]
            waiting = {}
        for node_id in waiting.values():
            self.fail(node_id, f"no reply within {now.timeout_s:g} s")
        good.sort(key=lambda reply: self.registry.sort_key(reply.metadata.src_node_id))
        return self._same_metrics(good) if expected.metrics and good else good

    def is_good(self, reply: Message, node_id: int, expected: Expected) -> bool:
        """Check a reply of a node, once; learn its latency, or record it as a failure."""
        message_id = reply.metadata.reply_to_message_id
        if message_id in self.exchange.checked:
            return True
        reason = why_bad(reply, expected)
        if not reason and reply.metadata.src_node_id != node_id:
            reason = "it names another node as its source"
        if reason := reason or self._why_late(reply, node_id):
            self.fail(node_id, reason, None if reply.has_error() else message_id)
            return False
        self.exchange.checked.add(message_id)
        return True

    def count(self, replies: list[Message], weight_key: str | None) -> list[Message]:
        """Note whose replies go to the innermost strategy; none if their weights sum to 0."""
        if weight_key and not any(weight_of(reply, weight_key) for reply in replies):
            for reply in replies:  # Flower would divide by the sum
                self.drop(reply, f"{weight_key} is 0 in all replies")
            replies = []
        identity = self.registry.identity
        self.exchange.counted = [identity(reply.metadata.src_node_id) for reply in replies]
        return replies

    def drop(self, reply: Message, reason: str) -> None:
        """Record that a good reply does not count."""
        self.fail(reply.metadata.src_node_id, reason, reply.metadata.reply_to_message_id)

    def fail(self, node_id: int, reason: str, message_id: str | None = None) -> None:
        """Record that a node has no reply that counts; ``message_id``: of what it did answer."""
        self.note(node_id, f"reply dropped: {reason}", recorded=reason)
        identity = self.registry.identity(node_id)
        if message_id is not None:
            self.exchange.latency.pop(message_id, None)
            self.exchange.refused[node_id] = reason
        if identity not in self.exchange.failed:
            self.exchange.failed.append(identity)

    def check_progress(self, of: str = "training") -> None:
        """Stop a run whose replies are dropped for the same reason, so that none counts.

        In the first round; later in the second one, and in none before enough nodes have it.
        """
        now, before = self.exchange, self.refused.get(of, {})
        if now.counted:
            self.counting.add(of)
            self.refused[of] = {}
        if now.counted or not now.refused:
            return
        self.refused[of] = refused = before | now.refused
        ((reason, count),) = Counter(refused.values()).most_common(1)
        enough = count >= max(now.quorum, len(refused) / 2)
        if enough and (before or of not in self.counting):
            nodes = [self.registry.identity(n) for n, why in refused.items() if why == reason]
            share = "all" if count == len(refused) else f"{count} of {len(refused)}"
            raise RuntimeError(
                f"no reply to {of} counts, {share} for the same reason: {reason} "
                f"({', '.join(sorted(nodes)[:5])})."
            )

    # --- what is known of a reply ----------------------------------------------------

    def instruction_of(self, reply: Message) -> Message:
        """Return the instruction that a reply answers: what the node was sent, model included."""
        return self.exchange.instructions[reply.metadata.reply_to_message_id]

    def latency_of(self, reply: Message) -> Latency | None:
        """Return how long a node took for a good reply; None if that is unknown."""
        return self.exchange.latency.get(reply.metadata.reply_to_message_id)

    def seconds_by_node(self) -> dict[str, float]:
        """Return how long each node took in this exchange, by identity."""
        seconds: dict[str, float] = {}
        for message_id, message in self.exchange.instructions.items():
            if (latency := self.exchange.latency.get(message_id)) is not None:
                identity = self.registry.identity(message.metadata.dst_node_id)
                seconds[identity] = seconds.get(identity, 0.0) + latency.seconds
        return seconds

    def note(self, node_id: int, reason: str, *, recorded: str | None = None) -> None:
        """Record a failure that costs no reply of a node that was asked."""
        identity = self.registry.identity(node_id)
        log(WARNING, "%s: %s", identity, reason)
        self.info.failures.append(Failure(identity, recorded or reason))

    def _why_late(self, reply: Message, node_id: int) -> str | None:
        """Learn a reply's partition and latency; return why it came too late, if it did."""
        now, partition = self.exchange, reported_partition(reply)
        if partition is not None:
            self.registry.set_partition_id(node_id, partition)
        round_trip_s = now.round_trip_s.get(reply.metadata.reply_to_message_id)
        latency, complaint = judge_latency(reply, round_trip_s, simulated=now.simulated)
        if complaint:
            log(WARNING, "%s: latency not believed: %s", self.registry.identity(node_id), complaint)
        drop_private_metrics(reply)
        if latency is None:
            return None
        self.clock.emulated |= latency.emulated
        if latency.emulated and latency.seconds > now.timeout_s:
            return f"late: {latency.seconds:.3g} s, the time-out is {now.timeout_s:g} s"
        now.latency[reply.metadata.reply_to_message_id] = latency
        return None

    def _same_metrics(self, good: list[Message]) -> list[Message]:
        """Drop replies whose metrics have other names than those of the majority."""
        accepted = self.accepted.setdefault(self.exchange.messages[0].metadata.message_type, {})
        names = [metric_names(reply) for reply in good]
        usual, kept = usual_metrics(names, accepted), []
        for reply, name in zip(good, names, strict=True):
            if name == usual:
                kept.append(reply)
            else:
                self.drop(reply, "its metrics have other names than those of the others")
        accepted[usual] = accepted.get(usual, 0) + len(kept)
        return kept


# --- waiting for replies -------------------------------------------------------------------


def _wait(
    grid: Grid, messages: Sequence[Message], timeout_s: float, enough: int | None
) -> tuple[list[Message], dict[str, float]]:
    """Poll for replies; return them and the round trip of each."""
    start_s = time.monotonic()
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    replies: list[Message] = []
    round_trip_s: dict[str, float] = {}
    while waiting and time.monotonic() - start_s < timeout_s and not _is_enough(replies, enough):
        arrived = list(grid.pull_messages(waiting))
        for reply in arrived:
            round_trip_s[reply.metadata.reply_to_message_id] = time.monotonic() - start_s
        replies += arrived
        waiting -= round_trip_s.keys()
        if waiting and not arrived:
            time.sleep(POLL_S)
    return replies, round_trip_s


def _is_enough(replies: Sequence[Message], enough: int | None) -> bool:
    return enough is not None and sum(reply.has_content() for reply in replies) >= enough


def _first(replies: list[Message], enough: int | None) -> list[Message]:
    """Keep errors and the first ``enough`` replies on the devices' own clock."""
    if enough is None:
        return replies
    timed = [(reported_latency(r), r) for r in replies if r.has_content()]
    timed.sort(key=lambda pair: pair[0].seconds if pair[0] else inf)
    first = {id(reply) for _, reply in timed[:enough]}
    return [reply for reply in replies if reply.has_error() or id(reply) in first]


def _emulated_s(
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
