"""Which replies count, judged before any hook sees them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, NamedTuple
from weakref import proxy

from flwr.app import ArrayRecord, Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import format_of_trees, is_private
from flwr_hetero.errors import hint_for, last_line
from flwr_hetero.exchange.aggregate import check_arrays, holds_trees, weight_of
from flwr_hetero.exchange.arrivals import is_enough
from flwr_hetero.exchange.context import QUORUM, Exchange
from flwr_hetero.exchange.limits import keep_common, limit_updates, measure_updates
from flwr_hetero.records import (
    Latency,
    arrays_in,
    check_metrics,
    configs_in,
    divide,
    keep_metrics,
    metrics_in,
    named_metrics,
    names_in,
    read_number,
    reported_latency,
)

NO_EVALUATION = "No evaluate function registered with name 'default'"
"""What Flower's error says of a ClientApp without a function for evaluation."""
MAX_WEIGHT = 2.0**53
"""Weights above this are nonsense, and sums of them could be infinite."""
LATE_REST = 2.0
"""First rest of a node that is late beside the others, in times for which it was waited for."""
VOTERS = 10
"""Nodes, the last ones to answer, whose metrics are known where few answer at a time."""
MAX_SHARE, MAX_INCREASE = 10.0, 2.0
"""Most that examples of a node count: in medians of all; above one, in what it said first."""


class Expected(NamedTuple):
    """What the replies of an exchange must hold."""

    arrays: ArrayRecord | None = None
    weight_key: str | None = None
    metrics: bool = True
    trees: str | None = None
    """Boosted trees instead of arrays: as "json", or in "any" format."""
    update_limit: float | None = None
    """Largest norm of an update, in medians of all nodes."""

    @property
    def of_evaluation(self) -> bool:
        """Whether nodes were asked to evaluate a model, so that they send metrics alone."""
        return self.metrics and self.arrays is None and self.trees is None


@dataclass(frozen=True)
class Verdicts:
    """Judge replies to an exchange by themselves, each once: on arrival, if it is waited for."""

    context: Exchange
    expected: Expected
    wrappers: tuple[Any, ...] = ()

    def __call__(self, reply: Message, node_id: int) -> bool:
        """Return whether a reply of a node is good, or record it as a failure."""
        context = self.context
        message_id = reply.metadata.reply_to_message_id
        if message_id not in context.judged:
            found = is_good(context, reply, node_id, self.expected)
            for wrapper in self.wrappers:
                found = found and bool(kept(context, [reply], [wrapper.why_bad(context, reply)]))
            context.judged[message_id] = found
        return context.judged[message_id]


def judge_of(wrapper: Any, context: Exchange, *, trains: bool = True) -> Verdicts:
    """Return what judges replies to training, or to evaluation, for the outermost wrapper."""
    # The exchange refers to its judge: in a cycle, its models would wait for the garbage collector.
    context = proxy(context)
    key = getattr(wrapper.leaf, "weighted_by_key", None)
    trees = format_of_trees(wrapper.leaf)
    if not trains:
        return Verdicts(context, Expected(None, key))
    sent = None if trees else context.arrays
    # Noise for privacy is right only for updates that nobody shortens.
    limit = None if any(map(is_private, wrapper.chain())) else wrapper.update_limit
    wanted = Expected(sent, key, trees=trees, update_limit=limit)
    return Verdicts(context, wanted, wrapper.wrappers())


def accept(context: Exchange, replies: Sequence[Message], judge: Verdicts) -> list[Message]:
    """Return the good replies, sorted by node identity; record the others as failures."""
    expected = judge.expected
    good = _answers(context, replies, judge)
    sort_key = context.fleet.nodes.sort_key
    good.sort(key=lambda reply: sort_key(reply.metadata.src_node_id))
    if expected.arrays is not None:
        good = keep_common(context, good)
    if expected.metrics and good:
        good = _same_metrics(context, good)
        if expected.weight_key:
            _limit_examples(context, good, expected.weight_key)
    if expected.arrays is None or not good:
        return good
    # Without a limit, too, methods may ask how long updates are.
    found = measure_updates(context, good)
    if expected.update_limit is None:
        return good
    return limit_updates(context, found, expected.update_limit, expected.weight_key)


def _answers(context: Exchange, replies: Sequence[Message], judge: Verdicts) -> list[Message]:
    """Return what answers an instruction and is good by itself; nodes without are silent."""
    good = []
    book = context.fleet.nodes
    waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in context.messages}
    for reply in replies:
        node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
        if node_id is None:
            context.note(reply.metadata.src_node_id, "reply to a message that is not open")
            continue
        if not context.overlaps:
            book.mark_alive(node_id)
        if judge(reply, node_id):
            good.append(reply)
    if is_enough(good, context.enough):
        context.surplus = [m for m in context.messages if m.metadata.message_id in waiting]
        return good
    waited_s = context.timeout_s
    why = f"no reply within {context.timeout_s:g} s"
    if (late_s := context.late_s) < waited_s:
        # A node rests for longer than it was waited for.
        waited_s = LATE_REST * late_s
        why = f"no reply within {late_s:.3g} s, {context.fleet.late_limit:g} times what most take"
    for node_id in waiting.values():
        context.fail(node_id, f"{why} (late_limit)" if late_s < context.timeout_s else why)
        # A node that is away when it is to be timed is not asked again.
        if judge.expected.metrics and not context.overlaps:
            book.keep_silent(node_id, context.fleet.clock.virtual_s, waited_s)
    return good


def kept(context: Exchange, replies: list[Message], reasons: Sequence[str | None]) -> list[Message]:
    """Drop the replies with a reason; return the others."""
    for reply, reason in zip(replies, reasons, strict=True):
        if reason:
            context.drop(reply, reason)
    return [reply for reply, reason in zip(replies, reasons, strict=True) if not reason]


def is_good(context: Exchange, reply: Message, node_id: int, expected: Expected) -> bool:
    """Check a reply of a node, once; learn its latency, or record it as a failure."""
    message_id = reply.metadata.reply_to_message_id
    if message_id in context.checked:
        return True
    try:
        check_form(reply, expected)
        if reply.metadata.src_node_id != node_id:
            raise ValueError("it names another node as its source")
        _learn_latency(context, reply)
        if expected.weight_key:
            weigh_by_job(context, reply, expected.weight_key)
    except ValueError as error:
        if expected.of_evaluation and reply.has_error() and NO_EVALUATION in str(error):
            context.cannot_evaluate(node_id)
            return False
        # An error whose cause is unknown may not come the next time.
        answered = reply.has_content() or (expected.arrays is not None and hint_for(str(error)))
        context.fail(node_id, str(error), message_id if answered else None)
        return False
    context.checked[message_id] = True
    return True


def check_form(reply: Message, expected: Expected) -> None:
    """Check a reply by itself; ValueError says what is wrong with its form."""
    if reply.has_error():
        raise ValueError(f"error {reply.error.code}: {last_line(reply.error.reason)}")
    records = list(arrays_in(reply.content).values())
    if (expected.arrays is not None or expected.trees) and len(records) != 1:
        raise ValueError(f"{len(records)} ArrayRecords instead of 1")
    if expected.arrays is not None:
        check_arrays(records[0], expected.arrays)
    if expected.trees and not holds_trees(records[0], expected.trees):
        raise ValueError("its arrays are no boosted trees as Flower reads them")
    if expected.metrics:
        metrics = list(metrics_in(reply.content).values())
        key = expected.weight_key
        if len(metrics) != 1:
            raise ValueError(f"{len(metrics)} MetricRecords instead of 1")
        weight = 0 if key is None else metrics[0].get(key)
        if not (isinstance(weight, (int, float)) and 0 <= weight <= MAX_WEIGHT):
            text = f"metric {key!r} is {brief(weight)} instead of a number of at least 0"
            raise ValueError(text)


def weigh_by_job(context: Exchange, reply: Message, weight_key: str) -> None:
    """Let a node that counts the examples of a message count as it would after its whole job.

    Apps report the examples that they trained on, or the length of their loader. In FedAvg that is
    in proportion to their data, but a slice would then count by its steps twice.
    """
    work: Any = configs_in(reply.content).get(keys.WORK, {})
    steps = read_number(work, keys.NUM_STEPS, 0.0)
    job_steps = read_number(work, keys.JOB_STEPS, 0.0)
    if not 0 < steps < job_steps or keys.DATA_SIZE not in work:
        return
    passes = max(1.0, read_number(work, keys.PASSES, 1.0))
    processed = read_number(work, keys.EXAMPLES_PROCESSED, 0.0)
    for metrics in metrics_in(reply.content).values():
        said = read_number(metrics, weight_key)
        # Counted in the loop over all batches or over those of the last epoch, or len(loader).
        is_count = min(abs(said - processed), abs(said - processed / passes)) < processed / steps
        is_count |= said in (steps, steps / passes)
        more = min(said * job_steps / steps, MAX_WEIGHT)
        if said == read_number(work, keys.DATA_SIZE):
            # It may be either: what the node counted as before tells.
            known = context.fleet.examples.get(MessageType.TRAIN, {})
            _, last = known.get(context.identity(reply.metadata.src_node_id), (said, said))
            is_count &= abs(last - more) < abs(last - said)
        if is_count:
            metrics[weight_key] = round(more) if isinstance(metrics[weight_key], int) else more


def count(context: Exchange, replies: list[Message], weight_key: str | None) -> list[Message]:
    """Note whose replies go to the innermost strategy; none if their weights sum to 0."""
    if weight_key and not any(weight_of(reply, weight_key) for reply in replies):
        # Flower would divide by the sum
        replies = kept(context, replies, [f"{weight_key} is 0 in all replies"] * len(replies))
    context.counted = [context.identity(reply.metadata.src_node_id) for reply in replies]
    return replies


# --- latencies and metrics ---------------------------------------------------------------
def _learn_latency(context: Exchange, reply: Message) -> None:
    """Learn a reply's partition and latency."""
    if (partition := reported_partition(reply)) is not None:
        context.fleet.nodes.set_partition_id(reply.metadata.src_node_id, partition)
    latency = judge_latency(context, reply)
    _settle_metrics(reply)
    if latency is None:
        return
    context.fleet.clock.emulated |= latency.emulated
    context.latency[reply.metadata.reply_to_message_id] = latency


def reported_partition(reply: Message) -> int | None:
    """Read the partition that a reply says it comes from."""
    record = configs_in(reply.content).get(keys.TIMING)
    value = None if record is None else record.get(keys.PARTITION_ID)
    return value if isinstance(value, int) and value >= 0 else None


def judge_latency(context: Exchange, reply: Message) -> Latency | None:
    """Return what a node says of its latency if it can be, else what the server saw, if it did."""
    reported = reported_latency(reply)
    seen_s = context.round_trip_s.get(reply.metadata.reply_to_message_id)
    observed = None if seen_s is None else Latency(seen_s, False, "observed")
    # Only a simulated device can be emulated.
    if reported is None or (reported.emulated and not context.simulated):
        return observed
    if seen_s is None or (reported.emulated and not context.same_clock):
        return reported
    # No node can have worked for longer than its reply took.
    if reported.seconds > seen_s * (1 + 1e-6):
        return observed
    # The round trip of a simulation contains the wait for a free worker.
    return reported if context.simulated else reported._replace(parts=divide(reply, seen_s))


def _settle_metrics(reply: Message) -> None:
    """Drop this package's private metrics; a work record's steps and examples are metrics.

    ValueError if the others cannot be shown.
    """
    trained = reply.metadata.message_type == MessageType.TRAIN
    work: Any = configs_in(reply.content).get(keys.WORK) if trained else None
    for record in metrics_in(reply.content).values():
        for key in [k for k in record if k == keys.TRAIN_TIME or k.startswith(keys.PREFIX)]:
            del record[key]
        for key in (keys.NUM_STEPS, keys.EXAMPLES_PROCESSED):
            if key not in record and 0 <= read_number(work or {}, key, -1.0) <= MAX_WEIGHT:
                record[key] = work[key]
    check_metrics(reply.content)


def _same_metrics(context: Exchange, good: list[Message]) -> list[Message]:
    """Drop replies whose metrics have other names than those of most; of few, other metrics."""
    fleet = context.fleet
    kind = context.messages[0].metadata.message_type
    nodes = [context.identity(reply.metadata.src_node_id) for reply in good]
    found = [named_metrics(reply.content) for reply in good]
    last = dict(zip(nodes, found, strict=True))
    others = {node: own for node, own in fleet.metrics.get(kind, {}).items() if node not in last}
    fleet.metrics[kind] = dict([*(others | last).items()][-VOTERS:])
    # One or two nodes would agree with themselves, so names count that three of the last nodes use.
    if len(last) < QUORUM:
        known = fleet.metrics[kind].values()
        counts = Counter(name for own in known for name in own)
        shared = {name for name in counts if counts[name] >= min(QUORUM, len(known))}
        keep_metrics((reply.content for reply in good), shared.intersection(*found))
    names = [names_in(reply.content) for reply in good]
    votes = Counter(dict(zip(nodes, names, strict=True)).values())
    # Earlier rounds count at a tie only. Otherwise a bad node once alone would exclude all.
    usual = max(votes, key=lambda name: (votes[name], name == fleet.usual_names.get(kind)))
    fleet.usual_names[kind] = usual
    other = "its metrics have other names than those of the others"
    return kept(context, good, [None if name == usual else other for name in names])


# --- claims beside those of others -------------------------------------------------------
def _limit_examples(context: Exchange, good: list[Message], weight_key: str) -> None:
    """Cut down what nodes say of their number of examples, by which they count."""
    kind = context.messages[0].metadata.message_type
    known = context.fleet.examples.setdefault(kind, {})
    names = [context.identity(reply.metadata.src_node_id) for reply in good]
    for reply, name in zip(good, names, strict=True):
        claim = weight_of(reply, weight_key)
        first, _ = known.get(name, (claim, claim))
        known[name] = (first, claim)
    context.fleet.num_claims += len(good)
    usual, count = context.fleet.usual_claim(kind, context.fleet.is_early(len(known), kind))
    # One claim has none to compare with.
    usual = usual if count > 1 else math.inf
    for reply, name in zip(good, names, strict=True):
        first, _ = known[name]
        # A server update may hold several replies of a node.
        claim = weight_of(reply, weight_key)
        # What a node said first may grow, but by no more than this, and to ten medians at most.
        most = min(MAX_SHARE * usual, max(MAX_INCREASE * first, usual))
        if claim <= most:
            continue
        for metrics in metrics_in(reply.content).values():
            metrics[weight_key] = int(most) if isinstance(metrics[weight_key], int) else most
        known[name] = (first, most)
        context.fleet.num_claims += 1
        # It is said once, because a large node is no failure in every round.
        if name not in context.fleet.cut:
            context.fleet.cut.add(name)
            text = f"claims {claim:g} {weight_key}, counts as {most:g}"
            context.note(reply.metadata.src_node_id, text)
