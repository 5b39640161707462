"""What all wrappers around one strategy know together: nodes, the current round, the clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.server.exchange import Latency, judge_latency, reported_partition
from flwr_hetero.server.nodes import NodeRegistry, is_simulated
from flwr_hetero.server.reply_checks import (
    Expected,
    drop_private_metrics,
    metric_names,
    odd_ones_out,
    weight_of,
    why_bad,
)


class Failure(NamedTuple):
    """A line of the history: a reply that was dropped or corrected, or that never came."""

    node: str
    reason: str
    lost: bool
    """Whether a node that was asked has no reply that counts."""


@dataclass
class Session:
    """Shared by all wrappers of one nest; the outermost one fills it."""

    registry: NodeRegistry = field(default_factory=NodeRegistry)
    timeout_s: float = float("inf")
    latency: dict[int, Latency] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    round_trip_s: dict[str, float] = field(default_factory=dict)
    virtual_s: float = 0.0
    wall_s: float = 0.0
    last_exchange_s: float = 0.0
    arrays: ArrayRecord | None = None
    config: ConfigRecord | None = None
    stop_reason: str | None = None
    devices: dict[str, dict[str, str | float]] = field(default_factory=dict)
    enough: int | None = None
    surplus: list[Message] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    accepted: dict[str, dict[str, int]] = field(default_factory=dict)
    emulated: bool = False
    simulated: bool = False
    _num_earlier: int = 0

    def begin_round(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Open the books of a round."""
        self.failures, self._num_earlier = [], 0
        self.arrays, self.config = arrays, config

    def ask(self, messages: Sequence[Message], grid: Grid) -> None:
        """Remember the instructions of an exchange, to know whose replies they get."""
        self.asked = list(messages)
        self.simulated = is_simulated(grid)
        self.round_trip_s = {}
        self.latency = {}
        self._num_earlier = len(self.failures)

    def take_in(self, replies: Sequence[Message], expected: Expected) -> list[Message]:
        """Sort the good replies by node identity and put the others down as failures."""
        waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in self.asked}
        answers = sum(reply.has_content() for reply in replies)
        good: dict[int, Message] = {}
        for reply in replies:
            node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:
                self.note(reply.metadata.src_node_id, "reply to a message that is not open")
            elif reason := why_bad(reply, expected) or self._why_late(reply, node_id):
                self.fail(node_id, reason)
            else:
                good[node_id] = reply
        self.surplus = []
        if self.enough is not None and answers >= self.enough:
            self.surplus = [m for m in self.asked if m.metadata.message_id in waiting]
            waiting = {}
        for node_id in waiting.values():
            self.fail(node_id, f"no reply within {self.timeout_s:g} s")
        ordered = sorted(good, key=self.registry.sort_key)
        agreed = [good[node_id] for node_id in ordered]
        if expected.metrics:
            agreed = self._agree(agreed)
        return agreed

    def drop_weightless(self, replies: list[Message], weight_key: str | None) -> list[Message]:
        """Drop all replies if none has a weight: Flower would divide by their sum."""
        if weight_key is None or any(weight_of(reply, weight_key) for reply in replies):
            return replies
        for reply in replies:
            self.fail(reply.metadata.src_node_id, f"{weight_key} is 0 in all replies")
        return []

    def fail(self, node_id: int, reason: str) -> None:
        """Put down that the reply of a node that was asked does not count."""
        self.latency.pop(node_id, None)
        self._record_failure(node_id, reason, lost=True)

    def note(self, node_id: int, reason: str) -> None:
        """Record a failure that costs no reply of a node that was asked."""
        self._record_failure(node_id, reason, lost=False)

    def failed(self) -> list[str]:
        """Return the nodes asked in this exchange that have no reply that counts."""
        return list(dict.fromkeys(f.node for f in self.failures[self._num_earlier :] if f.lost))

    def _record_failure(self, node_id: int, reason: str, *, lost: bool) -> None:
        identity = self.registry.identity(node_id)
        log(WARNING, "%s: %s: %s", identity, "reply dropped" if lost else "noted", reason)
        self.failures.append(Failure(identity, reason, lost))

    def _why_late(self, reply: Message, node_id: int) -> str | None:
        partition = reported_partition(reply)
        if partition is not None:
            self.registry.set_partition_id(node_id, partition)
        round_trip_s = self.round_trip_s.get(reply.metadata.reply_to_message_id)
        latency, complaint = judge_latency(reply, round_trip_s, simulated=self.simulated)
        if complaint:
            log(WARNING, "%s: latency not believed: %s", self.registry.identity(node_id), complaint)
        drop_private_metrics(reply)
        if latency is None:
            return None
        self.emulated = self.emulated or latency.emulated
        if latency.emulated and latency.seconds > self.timeout_s:
            return f"late: {latency.seconds:.3g} s, the time-out is {self.timeout_s:g} s"
        self.latency[node_id] = latency
        return None

    def _agree(self, good: list[Message]) -> list[Message]:
        if not good:
            return []
        accepted = self.accepted.setdefault(self.asked[0].metadata.message_type, {})
        names = [metric_names(reply) for reply in good]
        odd = odd_ones_out(names, accepted)
        for position in odd:
            reason = "its metrics have other names than those of the others"
            self.fail(good[position].metadata.src_node_id, reason)
        kept = [position for position in range(len(good)) if position not in odd]
        for position in kept:
            accepted[names[position]] = accepted.get(names[position], 0) + 1
        return [good[position] for position in kept]


def expected_of(arrays: ArrayRecord | None, leaf: Strategy) -> Expected:
    """Tell what the replies must hold for a given innermost strategy."""
    trees = trains_trees(leaf)
    return Expected(None if trees else arrays, getattr(leaf, "weighted_by_key", None))
