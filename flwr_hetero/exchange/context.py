"""The context of hooks: an exchange with nodes, and the state that lasts for the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from math import inf
from statistics import median_high
from typing import Any, TypeAlias

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from flwr_hetero._flwr import NODE_UNAVAILABLE, log
from flwr_hetero.errors import clean, with_hint
from flwr_hetero.exchange.nodes import Figure, NodeBook, usual_of, whole_grid
from flwr_hetero.exchange.queue import Clock, Costs, MessageQueue, on_clock
from flwr_hetero.records import Latency, reported_latency

Messages: TypeAlias = list[Message]
Judge: TypeAlias = Callable[[Message, int], bool]
"""Whether a reply of a node would be accepted; asked once, when the reply is here."""
QUORUM = 3
"""Number of nodes with the same fault from which on the app is blamed, instead of the nodes."""
MOST_TEXT = 300
"""Largest number of characters of a reason, which may quote the text of a node."""
EQUAL_S = 1.0
"""Latency in seconds of all nodes if neither they nor the server measure it, as in simulations."""
NO_EVALUATION_TEXT = (
    "has no function for evaluation, and is not asked for one again. Nodes that have one "
    "(@app.evaluate() in the ClientApp) tell how good the model is on each device's data; "
    "FedAvg(fraction_evaluate=0.0) asks none"
)
TRUSTED = 0.5
"""A node's own time counts as at least this part of the round trip that the server measured."""


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
    """Whether other exchanges are in flight, so that a missing reply does not count as silence."""
    quorum: int = QUORUM
    """Number of nodes that must agree in a fault: smaller if fewer nodes are online."""
    # --- times in seconds of the fleet's clock
    virtual_s: float = 0.0
    """Time of the whole exchange."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """By message: the time that the server measured."""
    same_clock: bool = False
    """Whether nodes report times on the clock of round trips: not in Flower's simulation."""
    latency: dict[str, Latency] = field(default_factory=dict)
    judge: Judge | None = None
    late_s: float = inf
    """Time for which the last nodes were waited for; infinity: until the time-out."""
    # --- results
    judged: dict[str, bool] = field(default_factory=dict)
    """By message: whether the reply is good on its own, before it is compared with others."""
    checked: dict[str, bool] = field(default_factory=dict)
    """By message: whether the reply was good on arrival."""
    surplus: list[Message] = field(default_factory=list)
    """Instructions whose replies the exchange did not wait for."""
    counted: list[str] = field(default_factory=list)
    """Nodes whose replies went to the innermost strategy."""
    left_out: dict[str, Array] = field(default_factory=dict)
    """Arrays that most nodes do not return, with the values that they keep."""
    weights: dict[str, float] = field(default_factory=dict)
    """By node: the weight of its model."""
    shortened: dict[str, float] = field(default_factory=dict)
    """By node: the part of its update's length that remains."""
    failed: dict[int, str] = field(default_factory=dict)
    """By id of a node without a reply that counts: the reason."""
    refused: set[int] = field(default_factory=set)
    """The failed nodes that did reply."""
    _by_id: dict[str, Message] = field(default_factory=dict)

    def ask(self, messages: Sequence[Message], grid: Grid, judge: Judge | None = None) -> None:
        """Begin the exchange, which accepts replies to these instructions only."""
        queue = self.fleet.queue_on(grid)
        self.messages = list(messages)
        self.simulated = queue.is_simulated
        self.judge = judge
        nodes = [message.metadata.dst_node_id for message in messages]
        self.fleet.nodes.learn(grid, nodes)
        for kind in {message.metadata.message_type for message in messages}:
            self.fleet.asked[kind].update(nodes)
        if len(messages) < QUORUM:
            self.quorum = min(QUORUM, max(1, len(queue.online())))

    def send(self, grid: Grid) -> list[Message]:
        """Send the instructions, and wait for enough good replies."""
        if not self.messages:
            return []
        queue = self.fleet.queue_on(grid)
        queue.resume()
        began_s = queue.clock.virtual_s
        self.same_clock = queue.is_local or not queue.is_simulated
        sent = queue.send(self.messages, self.timeout_s)
        arrivals = Arrivals(self, sent, is_real=not queue.is_simulated)
        queue.forget(queue.pending.keys() - sent)
        if self.same_clock or queue.finds_emulated():
            self._wait(queue, arrivals, began_s)
        else:
            self._wait_for_all(queue, arrivals)
        arrivals.close()
        if arrivals.are_enough():
            queue.leave(arrivals.waiting)
        else:
            queue.forget(arrivals.waiting)
        # Rounded to nanoseconds, because the clock of a resumed run begins at another time.
        self.virtual_s = on_clock(queue.clock.virtual_s - began_s)
        return arrivals.replies

    def _wait(self, queue: MessageQueue, arrivals: Arrivals, began_s: float) -> None:
        """Wait for replies until the others of their nodes say that it takes too long."""
        clock = queue.clock
        until_s = began_s + arrivals.limit_s()
        while not arrivals.is_over():
            was_time_over = clock.virtual_s >= on_clock(until_s)
            answers = queue.next(until_s)
            for job, reply in answers:
                if reply is not None:
                    took_s = queue.took_s(job)
                    if self.same_clock:
                        self.round_trip_s[job.message_id] = took_s
                    arrivals.add(reply, took_s)
            is_time_over = clock.virtual_s >= on_clock(until_s)
            if is_time_over or arrivals.tells_more():
                longer_s = began_s + arrivals.limit_s()
                if longer_s <= until_s and is_time_over and (was_time_over or not answers):
                    break
                until_s = longer_s

    def _wait_for_all(self, queue: MessageQueue, arrivals: Arrivals) -> None:
        """Wait for all replies of nodes that share workers; the first by their own time count.

        A round trip contains the wait for a free worker, so that nobody is late.
        """
        replies: list[Message] = []
        while queue.pending:
            for job, reply in queue.next():
                if reply is not None:
                    self.round_trip_s[job.message_id] = queue.took_s(job)
                    replies.append(reply)
        replies.sort(key=device_s)
        for reply in replies:
            if arrivals.is_over():
                queue.put_aside(reply)
            else:
                arrivals.add(reply, device_s(reply))

    def beside(self, timeout_s: float) -> Exchange:
        """Return a new exchange in the same round."""
        return Exchange(self.fleet, self.round, self.arrays, self.config, timeout_s)

    # --- what hooks ask ----------------------------------------------------------------
    def identity(self, node_id: int) -> str:
        """Return a node's stable identity: name, key, partition or id, in that order."""
        return self.fleet.nodes.identity(node_id)

    def instruction_of(self, reply: Message) -> Message:
        """Return the instruction that a reply answers, with the model that the node got."""
        # Messages have an id only after they were sent.
        if len(self._by_id) != len(self.messages):
            self._by_id = {message.metadata.message_id: message for message in self.messages}
        return self._by_id[reply.metadata.reply_to_message_id]

    def latency_of(self, reply: Message) -> Latency | None:
        """Return the time that a node needed for a good reply; None if it is unknown."""
        return self.latency.get(reply.metadata.reply_to_message_id)

    def comparable_s(self, reply: Message) -> float:
        """Return the time in seconds that a node needed, on a scale common to all nodes."""
        latency = self.latency_of(reply)
        if self.same_clock and latency:
            seen_s = self.round_trip_s.get(reply.metadata.reply_to_message_id, 0.0)
            return max(latency.seconds, TRUSTED * seen_s)
        # In a simulation, a round trip contains the wait for a free worker.
        if latency is None or (latency.source == "observed" and self.simulated):
            return EQUAL_S
        return latency.seconds

    def failed_nodes(self) -> list[str]:
        """Return the identities of the nodes without a reply that counts."""
        return [self.identity(node_id) for node_id in self.failed]

    def believed(self, kind: str = MessageType.TRAIN) -> float:
        """Return how many nodes must show a fault before the app, not the nodes, is blamed."""
        return max(self.quorum, self.fleet.num_asked(kind) / 2)

    # --- what does not count -----------------------------------------------------------
    def drop(self, reply: Message, reason: str) -> None:
        """Record that a good reply does not count."""
        self.fail(reply.metadata.src_node_id, reason, reply.metadata.reply_to_message_id)

    def fail(self, node_id: int, reason: str, message_id: str | None = None) -> None:
        """Record that no reply of a node counts; ``message_id``: the instruction it replied to."""
        reason = clean(reason, MOST_TEXT)
        self.note(node_id, f"reply dropped: {reason}", reason)
        if message_id is not None:
            self.latency.pop(message_id, None)
            self.refused.add(node_id)
        self.failed[node_id] = reason

    def cannot_evaluate(self, node_id: int) -> None:
        """Ask a node for no more evaluations, since its app has no function for them."""
        if not self.fleet.cannot_evaluate:
            log(WARNING, "%s %s", self.identity(node_id), NO_EVALUATION_TEXT)
        self.fleet.cannot_evaluate.add(node_id)

    def note(self, node_id: int, text: str, reason: str = "") -> None:
        """Log and record a failure, without dropping a reply."""
        self.fleet.nodes.warn(node_id, text)
        reason = clean(reason or text, MOST_TEXT)
        self.fleet.failures.append({"node": self.identity(node_id), "reason": reason})


# --- when an exchange is over ----------------------------------------------------------------
LATE_LIMIT = 50.0
"""Median times of the nodes after which one is late; the paper's fastest and slowest: 40 apart."""
LEAST_TIMED, MOST_TIMED = 4, 100
"""Other nodes whose times are known before one is late; of the last ones to answer they are."""
LEAST_S = 10.0
"""Seconds that every real node has, for its app may have to start first."""


class Arrivals:
    """The replies to an exchange so far, how many are good, and how long to wait for others.

    A reply is judged when it is here, so that bad replies take no place of good ones.
    """

    def __init__(self, exchange: Exchange, sent: Collection[str], *, is_real: bool) -> None:
        self.exchange = exchange
        self.is_real = is_real
        # By message, the nodes that are waited for.
        self.waiting: dict[str, int] = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in exchange.messages
            if message.metadata.message_id in sent
        }
        kind = exchange.messages[0].metadata.message_type
        # By node, how long it took for its last good reply to a message of this type.
        self.known_s = exchange.fleet.times_s.setdefault(kind, {})
        self.replies: list[Message] = []
        # By node: how long it took for its good reply.
        self.took_s: dict[str, float] = {}
        self._num_useful = len(self.waiting)
        self._known_at = 0

    def add(self, reply: Message, took_s: float) -> None:
        """Judge a reply that is here."""
        self.replies.append(reply)
        node_id = self.waiting.pop(reply.metadata.reply_to_message_id)
        judge = self.exchange.judge
        if judge(reply, node_id) if judge else reply.has_content():
            self.took_s[self.exchange.identity(node_id)] = took_s
        else:
            self._num_useful -= 1
            self._known_at = 0

    def are_enough(self) -> bool:
        """Return whether so many good replies are here that the others are not waited for."""
        return is_enough(self.took_s, self.exchange.enough)

    def is_over(self) -> bool:
        """Return whether nobody has to be waited for."""
        return not self.waiting or self.are_enough()

    def limit_s(self) -> float:
        """Return how long to wait at most, since the instructions were sent."""
        return min(self.exchange.timeout_s, self.late_s())

    def tells_more(self) -> bool:
        """Return whether more is known since the last call of how long to wait.

        To find that out for each reply would take time in proportion to the square of their number.
        """
        if len(self.took_s) < self._known_at:
            return False
        few = max(self._most - len(self.took_s), LEAST_TIMED - len(self._times_s()))
        self._known_at = len(self.took_s) + few if few > 0 else self._num_useful + 1
        return True

    @property
    def _most(self) -> int:
        """How many are most of the nodes that have not failed."""
        return self._num_useful // 2 + 1

    def late_s(self) -> float:
        """Return after how long a node is late beside the others; infinity if they do not tell."""
        limit = self.exchange.fleet.late_limit
        if limit is None or len(self.took_s) < self._most:
            return inf
        # These nodes did the same work. Where they are few, earlier times count as well.
        least_s = limit * sorted(self.took_s.values())[self._most - 1]
        return max(least_s, late_after_s(self._times_s(), limit, is_real=self.is_real))

    def _times_s(self) -> list[float]:
        """Return how long nodes took the last time that are not waited for."""
        late = set(map(self.exchange.identity, self.waiting.values()))
        known_s = self.known_s | self.took_s
        return [seconds for name, seconds in known_s.items() if name not in late]

    def close(self) -> None:
        """Keep the times for later exchanges, and note it if nodes are late beside the others."""
        if not self.is_over() and (late_s := self.late_s()) < self.exchange.timeout_s:
            self.exchange.late_s = late_s
        for name, took_s in self.took_s.items():
            if took_s < inf:
                self.known_s.pop(name, None)
                self.known_s[name] = took_s
        for name in [*self.known_s][:-MOST_TIMED]:
            del self.known_s[name]


def late_after_s(times_s: Collection[float], limit: float | None, *, is_real: bool) -> float:
    """Return after how long a node is late beside others that took these times."""
    if limit is None or len(times_s) < LEAST_TIMED:
        return inf
    return max(limit * median_high(times_s), LEAST_S if is_real else 0.0)


def device_s(reply: Message) -> float:
    """Return how long a device took by its own clock; infinity if it does not say."""
    if not reply.has_content():
        return 0.0
    latency = reported_latency(reply)
    return latency.seconds if latency else inf


def is_enough(good: Collection[object], enough: int | None) -> bool:
    """Return whether so many good replies are here."""
    return enough is not None and len(good) >= enough


# --- what lasts for the run --------------------------------------------------------------
class Votes:
    """Which arrays the last reply of each node left out.

    Nodes that leave out the same share one set, which may hold hundreds of names.

    >>> votes = Votes()
    >>> for node, names in {"a": {"base"}, "b": {"base"}, "c": set()}.items():
    ...     votes.cast(node, frozenset(names))
    >>> votes.by_array()
    Counter({'base': 2})
    """

    def __init__(self) -> None:
        self.by_node: dict[str, frozenset[str]] = {}
        # By set of arrays: the number of nodes that leave it out.
        self._counts = Counter[frozenset[str]]()

    def cast(self, node: str, names: frozenset[str]) -> None:
        """Replace the vote of a node."""
        before = self.by_node.get(node)
        if before == names:
            return
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        self._counts[names] += 1
        self.by_node[node] = names

    def by_array(self) -> Counter[str]:
        """Count by array how many nodes leave it out."""
        found = Counter[str]()
        for names, count in self._counts.items():
            found.update(dict.fromkeys(names, count))
        return found

    def to_json(self) -> list[tuple[list[str], list[str]]]:
        """Write each set of arrays once, with the nodes that leave it out."""
        nodes_of: dict[frozenset[str], list[str]] = {}
        for node, names in self.by_node.items():
            nodes_of.setdefault(names, []).append(node)
        return [(sorted(names), nodes) for names, nodes in nodes_of.items()]

    @classmethod
    def from_json(cls, saved: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Votes:
        """Read what :meth:`to_json` wrote."""
        votes = cls()
        for names, nodes in saved:
            shared = frozenset(map(str, names))
            for node in nodes:
                votes.cast(str(node), shared)
        return votes


@dataclass
class Fleet:
    """The state of a run that all wrappers around one strategy share."""

    nodes: NodeBook = field(default_factory=NodeBook)
    clock: Clock = field(default_factory=Clock)
    costs: Costs = field(default_factory=Costs)
    queue: MessageQueue | None = None
    """What is on its way to and from the nodes of the grid in use."""
    stop_reason: str | None = None
    """Why the run ends after this round."""
    is_running: bool = False
    """Whether a call of ``start`` is in progress."""
    late_limit: float | None = LATE_LIMIT
    """Number of median times of other nodes after which a node is late; None: the time-out."""
    update_limit: float | None = 4.0
    # --- of this round
    failures: list[dict[str, str]] = field(default_factory=list)
    """Replies that were dropped or corrected, or that never came."""
    by_node: dict[str, Any] = field(default_factory=dict)
    """The quality of the model on each node."""
    reported: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By "train" or "evaluate" and metric: the values after limits. "limited": the nodes cut."""
    # --- all replies so far, with which later ones are compared
    times_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By message type and node, the latest at the end: the time of its last good reply."""
    asked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By message type: nodes that were asked so far."""
    metrics: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    """By message type and node, the latest at the end: the metrics of its last reply."""
    usual_names: dict[str, str] = field(default_factory=dict)
    """By message type: digest of the names of metrics that were accepted last."""
    examples: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """By message type and node: its examples as first reported, and as last counted."""
    cannot_evaluate: set[int] = field(default_factory=set)
    """Nodes whose apps have no function for evaluation."""
    num_claims: int = 0
    """The number of times that a node has said how many examples it has."""
    cut: set[str] = field(default_factory=set)
    """What was said of nodes once: of which numbers of examples, metrics or arrays were cut."""
    norms: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By node, the latest at the end: norms (parameters, statistics) of its update, and steps."""
    most_usual: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """The largest median of ``norms`` in the run."""
    votes: Votes = field(default_factory=Votes)
    """Which arrays the last reply of each node left out."""
    first_arrays: dict[str, Array] | None = None
    """The first model, until most nodes that were asked have replied."""
    standstill: dict[str, Standstill] = field(default_factory=lambda: defaultdict(Standstill))
    """By "training" and "evaluation"."""

    _num_asked: dict[str, Figure[int]] = field(default_factory=lambda: defaultdict(Figure))
    _usual_claim: dict[tuple[str, bool], Figure[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(Figure)
    )

    def queue_on(self, grid: Grid) -> MessageQueue:
        """Return the queue of a grid, which is a new one if another grid was used before."""
        if self.queue is None or self.queue.grid is not whole_grid(grid):
            self.queue = MessageQueue(grid, self.clock, self.costs)
        return self.queue

    def begin_round(self) -> None:
        """Clear the failures and metrics of the last round."""
        self.failures = []
        self.by_node = {}
        self.reported = {}

    def is_first(self, text: str) -> bool:
        """Return whether something is said for the first time in a run."""
        if text in self.cut:
            return False
        self.cut.add(text)
        return True

    def num_asked(self, kind: str) -> int:
        """Return the number of nodes asked so far; after a resume, of nodes that have replied."""
        asked = self.asked[kind]
        replied = self.examples.get(kind, {})
        return self._num_asked[kind].of(
            lambda: len({*map(self.nodes.identity, asked), *replied}),
            changes=len(asked) + len(replied),
            nodes=len(asked),
        )

    def usual_claim(self, kind: str, early: bool) -> tuple[float, int]:
        """Return how many examples most nodes say that they have, and how many nodes say so."""

        def compute() -> tuple[float, int]:
            claims = [last for _, last in self.examples.get(kind, {}).values() if last]
            return usual_of(claims or [inf], early), len(claims)

        num_known = len(self.examples.get(kind, ()))
        return self._usual_claim[kind, early].of(compute, self.num_claims, num_known)

    def is_early(self, known: int, kind: str) -> bool:
        """Return whether fewer than half of the nodes asked are known."""
        return 2 * known < self.num_asked(kind)

    @property
    def begun(self) -> bool:
        """Whether a reply to training has counted."""
        return self.standstill["training"].begun


# --- when no reply counts --------------------------------------------------------------------
FRUITLESS_ROUNDS, FRUITLESS_REPLIES = 2, 12
"""Rounds and, once one has counted, replies in a row that do not count, which end a run."""
MOST_ROUNDS = 20
"""Rounds in a row in which no reply counts that end a run, however few nodes are asked."""
TYPES = {"training": MessageType.TRAIN, "evaluation": MessageType.EVALUATE}


class NoProgressError(RuntimeError):
    """No reply has counted for a while."""


@dataclass
class Standstill:
    """Exchanges in a row without a reply that counts."""

    begun: bool = False
    """Whether a reply has counted before."""
    rounds: int = 0
    replies: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """The last failure of each node."""
    refused: set[int] = field(default_factory=set)


def check_progress(context: Exchange, of: str = "training") -> None:
    """Stop a run in which no reply has counted for a while, of enough nodes."""
    book = context.fleet.standstill[of]
    if context.counted:
        if book.rounds or not book.begun:
            context.fleet.standstill[of] = Standstill(begun=True)
        return
    failed = context.failed
    if all(why.startswith(f"error {NODE_UNAVAILABLE}:") for why in failed.values()):
        return
    book.rounds += 1
    book.replies += len(failed)
    book.failed |= failed
    book.refused = book.refused - failed.keys() | context.refused
    believed = context.believed(TYPES[of])
    # The same reason ends the run in the first round, or in the second if replies have counted.
    if context.refused and (book.rounds > 1 or not book.begun):
        [(reason, count)] = Counter(book.failed[node] for node in book.refused).most_common(1)
        if count >= max(believed, len(book.refused) / 2):
            nodes = sorted(context.identity(n) for n in book.refused if book.failed[n] == reason)
            share = "all" if count == len(book.refused) else f"{count} of {len(book.refused)}"
            text = f"no reply to {of} counts, {share} for the same reason: {reason} "
            raise NoProgressError(with_hint(f"{text}({', '.join(nodes[:5])})."))
    enough = book.replies >= FRUITLESS_REPLIES or not book.begun
    of_most = len(book.failed) >= believed and book.rounds >= FRUITLESS_ROUNDS and enough
    if of == "training" and (
        of_most or (book.rounds >= MOST_ROUNDS and len(book.failed) >= context.quorum)
    ):
        reasons = [f"{context.identity(n)}: {why}" for n, why in sorted(book.failed.items())[:5]]
        text = f"no reply to training has counted in {book.rounds} rounds in a row"
        raise NoProgressError(with_hint(f"{text}: {'; '.join(reasons)}."))
