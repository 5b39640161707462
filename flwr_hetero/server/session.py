"""What all wrappers around one strategy share: nodes, model, clock, and the exchange going on."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import NODE_UNAVAILABLE
from flwr_hetero.errors import cure_for, with_cure
from flwr_hetero.server.contract import HookGuard
from flwr_hetero.server.exchange import (
    QUORUM,
    Clock,
    Costs,
    Exchange,
    emulated_s,
    first,
    is_enough,
    wait,
)
from flwr_hetero.server.node_half.work import settle_metrics
from flwr_hetero.server.nodes import NodeRegistry, is_simulated, online_nodes, whole_grid
from flwr_hetero.server.reply_checks import (
    Expected,
    Latency,
    Norms,
    judge_latency,
    metric_names,
    most_examples,
    norms_of,
    reported_partition,
    usual_examples,
    usual_metrics,
    weight_of,
    why_bad,
    why_too_large,
)

AWAY = f"error {NODE_UNAVAILABLE}:"
"""How the failure of a node that was not there begins."""
FRUITLESS_ROUNDS, FRUITLESS_REPLIES = 2, 12
"""Rounds and, once one has counted, replies in a row that do not count, which end a run."""
MOST_TEXT = 300  # characters of a reason, which may quote what the node wrote


class Failure(NamedTuple):
    """A reply that was dropped or corrected, or that never came."""

    node: str
    reason: str


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
    last did, ``counting`` where one has. ``examples`` has, by message type and node, of how many
    examples a node spoke first, and how many counted last.
    """

    registry: NodeRegistry = field(default_factory=NodeRegistry)
    clock: Clock = field(default_factory=Clock)
    exchange: Exchange = field(default_factory=Exchange)
    costs: Costs = field(default_factory=Costs)
    info: RoundInfo = field(default_factory=RoundInfo)
    arrays: ArrayRecord | None = None
    config: ConfigRecord | None = None
    enough: int | None = None
    stop_reason: str | None = None
    accepted: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, dict[int, str]] = field(default_factory=dict)
    counting: set[str] = field(default_factory=set)
    examples: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    _in_vain: list[dict[str, str]] = field(default_factory=list)
    _cut: set[str] = field(default_factory=set)
    _norms: dict[int, Norms] = field(default_factory=dict)
    hooks: HookGuard = field(default_factory=HookGuard)

    @property
    def begun(self) -> bool:
        """Whether a reply to training has counted."""
        return "training" in self.counting

    # --- out -------------------------------------------------------------------------

    def begin_round(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Begin a round with the global model and the run's training config."""
        self.info, self.arrays, self.config = RoundInfo(), arrays, config

    def ask(self, messages: Sequence[Message], grid: Grid) -> None:
        """Begin an exchange: only replies to these instructions are accepted."""
        self.exchange = Exchange(list(messages), is_simulated(grid))
        self.registry.learn_new(grid, [message.metadata.dst_node_id for message in messages])
        if len(messages) < QUORUM:
            self.exchange.quorum = min(QUORUM, max(1, len(online_nodes(whole_grid(grid)))))

    def send(self, grid: Grid, messages: Sequence[Message], timeout_s: float) -> list[Message]:
        """Send instructions, wait for all or enough replies, and advance the clock."""
        now = self.exchange
        fleet: Any = whole_grid(grid)
        now.timeout_s, by_devices = timeout_s, False
        if not messages:
            return []
        start_s = time.monotonic()
        if hasattr(fleet, "virtual_time_s"):
            began_s = fleet.virtual_time_s
            ids = fleet.push_messages(messages)
            arrived: list[Message] = fleet.wait_for(ids, timeout_s, self.enough)
            replies = arrived
            # to the nanosecond, so that a resumed run, whose clock began later, counts the same
            now.virtual_s = round(float(fleet.virtual_time_s) - began_s, 9)
            now.same_clock = True
            now.round_trip_s = {i: round(at_s - began_s, 9) for i, at_s in fleet.arrived_s.items()}
        elif is_simulated(fleet):  # the first replies are those first on the devices' clock
            arrived, now.round_trip_s = wait(fleet, messages, timeout_s, None)
            num_missing = 0 if is_enough(arrived, self.enough) else len(messages) - len(arrived)
            replies = first(arrived, self.enough)
            took_s = emulated_s(replies, num_missing, timeout_s, known=self.clock.emulated)
            by_devices = took_s is not None
            now.virtual_s = time.monotonic() - start_s if took_s is None else took_s
        else:
            arrived, now.round_trip_s = wait(fleet, messages, timeout_s, self.enough)
            replies = arrived
            now.virtual_s = time.monotonic() - start_s
            now.same_clock = True
        self.costs.sent(messages, self.clock.virtual_s, timeout_s)
        self.clock.virtual_s += now.virtual_s
        self.costs.answered(arrived, inf, {} if by_devices else now.round_trip_s)
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
                continue
            self.registry.heard_of(node_id)
            if self.is_good(reply, node_id, expected):
                good.append(reply)
        if self.enough is not None and is_enough(replies, self.enough):
            now.surplus = [m for m in now.messages if m.metadata.message_id in waiting]
            waiting = {}
        for node_id in waiting.values():
            self.fail(node_id, f"no reply within {now.timeout_s:g} s")
            if expected.metrics:  # a node that is away when it is to be timed is not asked again
                self.registry.kept_silent(node_id, self.clock.virtual_s, now.timeout_s)
        good.sort(key=lambda reply: self.registry.sort_key(reply.metadata.src_node_id))
        if expected.metrics and good:
            good = self._same_metrics(good)
            self._limit_examples(good, expected.weight_key)
        return good if expected.arrays is None else self._same_size(good, expected)

    def is_good(self, reply: Message, node_id: int, expected: Expected) -> bool:
        """Check a reply of a node, once; learn its latency, or record it as a failure."""
        message_id = reply.metadata.reply_to_message_id
        if message_id in self.exchange.checked:
            return True
        reason = why_bad(reply, expected)
        if not reason and reply.metadata.src_node_id != node_id:
            reason = "it names another node as its source"
        if reason := reason or self._why_late(reply, node_id):
            known = expected.arrays is not None and cure_for(reason)
            told = reply.has_content() or known  # else it may work the next time
            self.fail(node_id, reason, message_id if told else None)
            return False
        self.exchange.checked.add(message_id)
        return True

    def count(self, replies: list[Message], weight_key: str | None) -> list[Message]:
        """Note whose replies go to the innermost strategy; none if their weights sum to 0."""
        if weight_key and not any(weight_of(reply, weight_key) for reply in replies):
            for reply in replies:  # Flower would divide by the sum
                self.drop(reply, f"{weight_key} is 0 in all replies")
            replies = []
        self.exchange.counted = [self.registry.identity(r.metadata.src_node_id) for r in replies]
        return replies

    def drop(self, reply: Message, reason: str) -> None:
        """Record that a good reply does not count."""
        self.fail(reply.metadata.src_node_id, reason, reply.metadata.reply_to_message_id)

    def fail(self, node_id: int, reason: str, message_id: str | None = None) -> None:
        """Record that a node has no reply that counts; ``message_id``: of what it did answer."""
        reason = reason[:MOST_TEXT]
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
        if of == "training":
            self._check_fruitless()
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
            text = f"no reply to {of} counts, {share} for the same reason: {reason} "
            raise RuntimeError(with_cure(f"{text}({', '.join(sorted(nodes)[:5])})."))

    def _check_fruitless(self) -> None:
        """Stop a run in which no reply has counted for a while, of enough nodes."""
        now = self.exchange
        failures = {f.node: f.reason for f in self.info.failures if f.node in now.failed}
        if now.counted:
            self._in_vain.clear()
        elif any(not why.startswith(AWAY) for why in failures.values()):
            self._in_vain.append(failures)
        reasons = {node: why for failed in self._in_vain for node, why in failed.items()}
        rounds, replies = len(self._in_vain), sum(map(len, self._in_vain))
        enough = replies >= FRUITLESS_REPLIES or not self.begun
        if rounds >= FRUITLESS_ROUNDS and enough and len(reasons) >= now.quorum:
            told = "; ".join(f"{node}: {why}" for node, why in sorted(reasons.items())[:5])
            text = f"no reply to training has counted in {rounds} rounds in a row"
            raise RuntimeError(with_cure(f"{text}: {told}."))

    # --- what is known of a reply ----------------------------------------------------

    def instruction_of(self, reply: Message) -> Message:
        """Return the instruction that a reply answers: what the node was sent, model included."""
        return self.exchange.instructions[reply.metadata.reply_to_message_id]

    def latency_of(self, reply: Message) -> Latency | None:
        """Return how long a node took for a good reply; None if that is unknown."""
        return self.exchange.latency.get(reply.metadata.reply_to_message_id)

    def seconds_by_node(self) -> dict[str, float]:
        """Return how long each node took for a message of this exchange on average, by identity."""
        seconds: dict[str, list[float]] = {}
        for message_id, message in self.exchange.instructions.items():
            if (latency := self.exchange.latency.get(message_id)) is not None:
                identity = self.registry.identity(message.metadata.dst_node_id)
                seconds.setdefault(identity, []).append(latency.seconds)
        return {identity: sum(own) / len(own) for identity, own in seconds.items()}

    def note(self, node_id: int, reason: str, *, recorded: str | None = None) -> None:
        """Record a failure that costs no reply of a node that was asked."""
        identity = self.registry.identity(node_id)
        self.registry.warn(node_id, reason)
        self.info.failures.append(Failure(identity, recorded or reason))

    def _why_late(self, reply: Message, node_id: int) -> str | None:
        """Learn a reply's partition and latency; return why it came too late, if it did."""
        now, partition = self.exchange, reported_partition(reply)
        if partition is not None:
            self.registry.set_partition_id(node_id, partition)
        round_trip_s = now.round_trip_s.get(reply.metadata.reply_to_message_id)
        latency, complaint = judge_latency(
            reply, round_trip_s, simulated=now.simulated, same_clock=now.same_clock
        )
        if complaint:
            self.registry.warn(node_id, f"latency not believed: {complaint}")
        settle_metrics(reply)
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

    def _same_size(self, good: list[Message], expected: Expected) -> list[Message]:
        """Drop replies whose models are far larger than the model sent and those of others."""
        if not good or expected.arrays is None:
            return good
        sent, kept = norms_of(expected.arrays), []
        found = [norms_of(next(iter(reply.content.array_records.values()))) for reply in good]
        nodes = [reply.metadata.src_node_id for reply in good]
        everybody = self._norms | dict(zip(nodes, found, strict=True))
        reasons = why_too_large(found, sent, list(everybody.values()))
        for reply, node_id, own, reason in zip(good, nodes, found, reasons, strict=True):
            if reason:
                self.drop(reply, reason)
            else:
                kept.append(reply)
                self._norms[node_id] = own
        return kept

    def _limit_examples(self, good: list[Message], weight_key: str | None) -> None:
        """Cut down what nodes say of their number of examples, by which they count."""
        if weight_key is None:
            return
        kind = self.exchange.messages[0].metadata.message_type
        known = self.examples.setdefault(kind, {})
        for reply in good:
            claim = weight_of(reply, weight_key)
            name = self.registry.identity(reply.metadata.src_node_id)
            known[name] = known.get(name, (claim, claim))[0], claim
        usual = usual_examples(last for _, last in known.values())
        for reply in good:
            name = self.registry.identity(reply.metadata.src_node_id)
            said, claim = known[name][0], weight_of(reply, weight_key)  # a merge may hold several
            if claim <= (most := most_examples(said, usual)):
                continue
            for metrics in reply.content.metric_records.values():
                metrics[weight_key] = int(most) if isinstance(metrics[weight_key], int) else most
            known[name] = said, most
            if name not in self._cut:
                self._cut.add(name)
                text = f"claims {claim:g} {weight_key}, counts as {most:g}"
                self.note(reply.metadata.src_node_id, text)
