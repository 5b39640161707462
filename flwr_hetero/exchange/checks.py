"""Which replies count, and how much: checked once, before any hook sees them.

A reply is judged by itself when it arrives. When the exchange is over, it is compared with the
others: its arrays, the names of its metrics, its number of examples, and the length of its update.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO
from math import sqrt
from reprlib import repr as brief
from statistics import median_low
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import clean, hint_for, last_line
from flwr_hetero.exchange.aggregate import (
    Norms,
    check_arrays,
    holds_trees,
    model_norms,
    weight_of,
    with_update,
)
from flwr_hetero.exchange.context import QUORUM, Exchange, is_enough
from flwr_hetero.exchange.nodes import usual_of
from flwr_hetero.records import (
    Latency,
    arrays_in,
    check_metrics,
    config_in,
    divide,
    keep_metrics,
    metrics_in,
    metrics_of,
    model_of,
    named_metrics,
    names_in,
    read_number,
    reported_latency,
    steps_that_count,
)

NO_EVALUATION = "No evaluate function registered with name 'default'"
"""What Flower's error says of a ClientApp without a function for evaluation."""
MAX_WEIGHT = 2.0**53
"""Weights above this are nonsense, and sums of them could be infinite."""
LATE_REST = 2.0
"""First rest of a node that is late beside the others, in times for which it was waited for."""


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


def count(context: Exchange, replies: list[Message], weight_key: str | None) -> list[Message]:
    """Note whose replies go to the innermost strategy; none if their weights sum to 0."""
    if weight_key and not any(weight_of(reply, weight_key) for reply in replies):
        # Flower would divide by the sum
        replies = kept(context, replies, [f"{weight_key} is 0 in all replies"] * len(replies))
    context.counted = [context.identity(reply.metadata.src_node_id) for reply in replies]
    return replies


def kept(context: Exchange, replies: list[Message], reasons: Sequence[str | None]) -> list[Message]:
    """Drop the replies with a reason; return the others."""
    for reply, reason in zip(replies, reasons, strict=True):
        if reason:
            context.drop(reply, reason)
    return [reply for reply, reason in zip(replies, reasons, strict=True) if not reason]


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
        why += " (late_limit)"
    for node_id in waiting.values():
        context.fail(node_id, why)
        # A node that is away when it is to be timed is not asked again.
        if judge.expected.metrics and not context.overlaps:
            book.keep_silent(node_id, context.fleet.clock.virtual_s, waited_s)
    return good


# --- a reply by itself -------------------------------------------------------------------
def is_good(context: Exchange, reply: Message, node_id: int, expected: Expected) -> bool:
    """Check a reply of a node, once; learn its latency, or record it as a failure."""
    message_id = reply.metadata.reply_to_message_id
    if message_id in context.checked:
        return True
    try:
        check_form(reply, expected)
        if reply.metadata.src_node_id != node_id:
            raise ValueError("it names another node as its source")
        if (partition := reported_partition(reply)) is not None:
            context.fleet.nodes.set_partition_id(node_id, partition)
        latency = judge_latency(context, reply)
        _settle_metrics(reply)
        if latency is not None:
            context.fleet.clock.emulated |= latency.emulated
            context.latency[message_id] = latency
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
    if expected.arrays is not None or expected.trees:
        records = list(arrays_in(reply.content).values())
        if len(records) != 1:
            raise ValueError(f"{len(records)} ArrayRecords instead of 1")
        if expected.arrays is not None:
            check_arrays(records[0], expected.arrays)
        elif not holds_trees(records[0], str(expected.trees)):
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


def _settle_metrics(reply: Message) -> None:
    """Drop this package's private metrics; a work record's steps and examples are metrics.

    ValueError if the others cannot be shown.
    """
    trained = reply.metadata.message_type == MessageType.TRAIN
    work: Any = config_in(reply.content, keys.WORK) if trained else None
    for record in metrics_in(reply.content).values():
        for key in [k for k in record if k == keys.TRAIN_TIME or k.startswith(keys.PREFIX)]:
            del record[key]
        for key in (keys.NUM_STEPS, keys.EXAMPLES_PROCESSED) if work else ():
            if key not in record and 0 <= read_number(work, key, -1.0) <= MAX_WEIGHT:
                record[key] = work[key]
    check_metrics(reply.content)


def weigh_by_job(context: Exchange, reply: Message, weight_key: str) -> None:
    """Let a node that counts the examples of a message count as it would after its whole job.

    Apps report the examples that they trained on, or the length of their loader. In FedAvg that is
    in proportion to their data, but a slice would then count by its steps twice.
    """
    work: Any = config_in(reply.content, keys.WORK) or {}
    steps = read_number(work, keys.NUM_STEPS, 0.0)
    job_steps = read_number(work, keys.JOB_STEPS, 0.0)
    if not 0 < steps < job_steps or keys.DATA_SIZE not in work:
        return
    passes = max(1.0, read_number(work, keys.PASSES, 1.0))
    processed = read_number(work, keys.EXAMPLES_PROCESSED, 0.0)
    metrics = metrics_of(reply)
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


def reported_partition(reply: Message) -> int | None:
    """Read the partition that a reply says it comes from."""
    record = config_in(reply.content, keys.TIMING)
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


# --- metrics beside those of others ------------------------------------------------------
VOTERS = 10
"""Nodes, the last ones to answer, whose metrics are known where few answer at a time."""
MAX_SHARE, MAX_INCREASE = 10.0, 2.0
"""Most that examples of a node count: in medians of all; above one, in what it said first."""


def _same_metrics(context: Exchange, good: list[Message]) -> list[Message]:
    """Drop replies whose metrics have other names than those of most; of few, other metrics."""
    fleet = context.fleet
    kind = context.messages[0].metadata.message_type
    nodes = [context.identity(reply.metadata.src_node_id) for reply in good]
    found = [named_metrics(reply) for reply in good]
    last = dict(zip(nodes, found, strict=True))
    others = {node: own for node, own in fleet.metrics.get(kind, {}).items() if node not in last}
    fleet.metrics[kind] = dict([*(others | last).items()][-VOTERS:])
    # One or two nodes would agree with themselves, so names count that three of the last nodes use.
    if len(last) < QUORUM:
        known = fleet.metrics[kind].values()
        counts = Counter(name for own in known for name in own)
        shared = {name for name in counts if counts[name] >= min(QUORUM, len(known))}
        shared = shared.intersection(*found)
        for reply in good:
            keep_metrics(reply, shared)
    names = [names_in(reply) for reply in good]
    votes = Counter(dict(zip(nodes, names, strict=True)).values())
    # Earlier rounds count at a tie only. Otherwise a bad node once alone would exclude all.
    usual = max(votes, key=lambda name: (votes[name], name == fleet.usual_names.get(kind)))
    fleet.usual_names[kind] = usual
    other = "its metrics have other names than those of the others"
    return kept(context, good, [None if name == usual else other for name in names])


def _limit_examples(context: Exchange, good: list[Message], weight_key: str) -> None:
    """Cut down what nodes say of their number of examples, by which they count."""
    fleet = context.fleet
    kind = context.messages[0].metadata.message_type
    known = fleet.examples.setdefault(kind, {})
    names = [context.identity(reply.metadata.src_node_id) for reply in good]
    for reply, name in zip(good, names, strict=True):
        claim = weight_of(reply, weight_key)
        first, _ = known.get(name, (claim, claim))
        known[name] = (first, claim)
    fleet.num_claims += len(good)
    usual, num_claims = fleet.usual_claim(kind, fleet.is_early(len(known), kind))
    # One claim has none to compare with.
    usual = usual if num_claims > 1 else math.inf
    for reply, name in zip(good, names, strict=True):
        first, _ = known[name]
        # A server update may hold several replies of a node.
        claim = weight_of(reply, weight_key)
        # What a node said first may grow, but by no more than this, and to ten medians at most.
        most = min(MAX_SHARE * usual, max(MAX_INCREASE * first, usual))
        if claim <= most:
            continue
        metrics = metrics_of(reply)
        metrics[weight_key] = int(most) if isinstance(metrics[weight_key], int) else most
        known[name] = (first, most)
        fleet.num_claims += 1
        # A large node is no failure in every round.
        if fleet.is_first(name):
            text = f"claims {claim:g} {weight_key}, counts as {most:g}"
            context.note(reply.metadata.src_node_id, text)


# --- the length of updates ---------------------------------------------------------------
RECENT_NODES, RECENT_UPDATES = 50, 4
"""Nodes whose last norms count: so many, or so many times those of a server update if more."""
HEAVY = 4.0
"""Examples, in medians of the nodes, above which a heavier update has to be shorter."""
DIVERGED = 100.0
"""An update of so many times its limit is dropped."""
SMALL = 1.0
"""Norm up to which a model counts as this large: one of few numbers may be near zero."""
STILL = 1e-6
"""Of the model's norm, what an update has to be longer than to say how far others may move."""
Known = tuple[float, float, float]
"""Of a node's last update: norms of its parameters and running statistics, 0 where these did not
move, and steps."""
STILL_UPDATE: Known = (0.0, 0.0, 1.0)
"""The update of a node that does not move."""


class Measured(NamedTuple):
    """A good reply with the length of its update, and the steps that it was asked for."""

    reply: Message
    node: str
    start: ArrayRecord
    """The model that the node was sent."""
    norms: Norms
    steps: float


def measure_updates(context: Exchange, good: Sequence[Message]) -> list[Measured]:
    """Measure updates, and remember those of each node and what is usual."""
    fleet = context.fleet
    known = fleet.norms
    found = []
    for reply in good:
        asked = context.instruction_of(reply)
        start = model_of(asked)
        norms = model_norms(model_of(reply), start)
        node = context.identity(reply.metadata.src_node_id)
        found.append(Measured(reply, node, start, norms, steps_that_count(asked, reply)))
    still = [STILL * max(norm, SMALL) for norm in _norms_at_start(found[0])]
    for each in found:
        # The last update of each node counts, so that fast nodes do not set what is usual.
        known.pop(each.node, None)
        parameters, statistics = (
            own if own > least else 0.0 for own, least in zip(each.norms, still, strict=True)
        )
        known[each.node] = (parameters, statistics, each.steps)
    recent = max(RECENT_NODES, RECENT_UPDATES * len(good))
    fleet.norms = dict([*known.items()][-recent:])
    if len(known) >= QUORUM and not fleet.is_early(len(known), MessageType.TRAIN):
        fleet.most_usual = longer_of(fleet.most_usual, usual_update(fleet.norms.values()))
    return found


def limit_updates(
    context: Exchange, found: list[Measured], limit: float, weight_key: str | None = None
) -> list[Message]:
    r"""Shorten updates that are far longer than those of most nodes were; drop diverged ones.

    .. math:: m_i(t) = \operatorname{median}_j \left( \lVert d_j \rVert
              \max\left(1, \sqrt{\tau_i / \tau_j}\right) \right), \qquad
              \ell_i = \max\left(c \, m_i(t), \max_{s < t} m_i(s)\right), \qquad
              d_i \leftarrow \min\left(1, \frac{\ell_i}{\lVert d_i \rVert}\right)^2 d_i

    d_j: the last update of node j; tau_j: its assigned steps, or 1; c: the wrapper's
    ``update_limit``. Once most nodes have converged, their updates are short. A few nodes with
    other data have longer ones, and must not lose their vote for that. No node can tell these from
    liars that go as far. Of a node that claims far more examples than most, which weigh its update,
    the limit is shorter. More steps may make an update longer, but fewer need not make it shorter:
    a slow node may hold what no other does. By the square a lie counts the less, the larger it is.
    """
    fleet = context.fleet
    known = fleet.norms
    is_first = len(known) < QUORUM
    # A fleet of one or two nodes has none to compare with.
    if is_first and context.quorum < QUORUM:
        return [each.reply for each in found]
    few = sum(parameters > 0 for parameters, *_ in known.values()) < QUORUM
    early = fleet.is_early(len(known), MessageType.TRAIN)
    updates = [*known.values()]
    most = {
        steps: longest_update(updates, steps, limit, early, fleet.most_usual)
        for steps in {each.steps for each in found}
    }
    claims = fleet.examples.get(MessageType.TRAIN, {}) if weight_key else {}
    usual_claim, _ = fleet.usual_claim(MessageType.TRAIN, early)
    counted = []
    for each in found:
        reply = each.reply
        _, claim = claims.get(each.node, (0, 0))
        share = min(1.0, HEAVY * usual_claim / claim) if claim else 1.0
        longest = most[each.steps]
        if few:
            # Before others are known to move, the norm of the model stands for the median.
            own_size = limit * max(_norms_at_start(each).parameters, SMALL)
            longest = Norms(own_size, 0.0 if is_first else longest.statistics)
        parts = parts_that_count(each.norms, Norms(*(share * norm for norm in longest)))
        if (part := min(parts)) < DIVERGED**-2 and not few:
            context.drop(reply, f"its update is {part**-0.5:.3g} times as long as it may be")
            continue
        if part < 1:
            start = each.start
            reply = with_update(reply, start, start, parts[0], scale_of_buffers=parts[1])
            context.shortened[each.node] = part
            if fleet.is_first("updates"):
                text = "%s: its update is longer than most and counts with %.2g of its length "
                text += "(update_limit; Recorded keeps all in shortened)"
                log(INFO, text, each.node, part)
        counted.append(reply)
    return counted


def usual_update(known: Collection[Known]) -> Known:
    """Return the median norms of the updates that moved the model, and the median of their steps.

    >>> usual_update([(1.0, 0.0, 1), (2.0, 0.0, 4), (0.0, 0.0, 1), (9.0, 0.0, 4)])
    (2.0, 0.0, 4)
    """
    moved = [own for own in known if own[0]]
    if not moved:
        return STILL_UPDATE
    steps = median_low([own[2] for own in moved])
    statistics = [own[1] for own in moved if own[1]] or [0.0]
    return median_low([own[0] for own in moved]), median_low(statistics), steps


def longer_of(before: Known, now: Known) -> Known:
    """Return the longer one of two usual updates, of parameters and of running statistics.

    >>> longer_of((2.0, 1.0, 4), (3.0, 0.5, 9))
    (3.0, 1.0, 9)
    """
    longer = now if now[0] > before[0] else before
    return longer[0], max(before[1], now[1]), longer[2]


def longest_update(
    known: Sequence[Known],
    steps: float,
    limit: float,
    early: bool = False,
    before: Known = STILL_UPDATE,
) -> Norms:
    """Return the longest that an update of so many steps may be; 0 where that is unknown.

    before: the longest update that was usual so far.

    >>> longest_update([(1.0, 0.0, 1), (2.0, 0.0, 4), (3.0, 0.0, 9)], steps=4, limit=2)
    Norms(parameters=4.0, statistics=0.0)
    >>> longest_update([(0.1, 0.0, 4)] * 3, steps=4, limit=2, before=(2.0, 0.0, 4))
    Norms(parameters=2.0, statistics=0.0)
    """
    longest = []
    for part in range(2):
        # Nodes that did not move say nothing of how far others may.
        each = [own[part] * max(1.0, sqrt(steps / own[2])) for own in known if own[part]]
        now = usual_of(each or [0.0], early)
        past = before[part] * max(1.0, sqrt(steps / before[2]))
        longest.append(max(limit * now, past))
    return Norms(*longest)


def parts_that_count(own: Norms, most: Norms) -> Norms:
    """Return the parts of an update's length that count, of parameters and of statistics.

    >>> parts_that_count(Norms(8.0, 1.0), most=Norms(4.0, 2.0))
    Norms(parameters=0.25, statistics=1.0)
    """
    pairs = zip(own, most, strict=True)
    return Norms(*(min(1.0, limit / norm) ** 2 if norm and limit else 1.0 for norm, limit in pairs))


def _norms_at_start(each: Measured) -> Norms:
    """Return how large the model was that a node was sent, of the arrays that it returns."""
    return model_norms({name: each.start[name] for name in model_of(each.reply)})


# --- models of which nodes return a part, as of LoRA -------------------------------------
MOST_NAMES = 3
"""Arrays that a reason or a log line names."""


def keep_common(context: Exchange, replies: Sequence[Message]) -> list[Message]:
    """Keep replies that have what most nodes return; take out of them what most leave out.

    By its last reply each node has a vote on each array. One that half of the nodes or more leave
    out keeps the server's value, to the bit.
    """
    fleet = context.fleet
    votes = fleet.votes
    sent = context.arrays
    if fleet.first_arrays is None:
        fleet.first_arrays = dict(sent.items())
    for reply in replies:
        names = frozenset(sent.keys() - model_of(reply).keys())
        votes.cast(context.identity(reply.metadata.src_node_id), names)
    counts = votes.by_array()
    total = len(votes.by_node)
    left_out = [name for name in sent if counts[name] and 2 * counts[name] >= total]
    # A few bad nodes may answer first. What they have changed is undone once most disagree.
    context.left_out = {name: fleet.first_arrays.get(name, sent[name]) for name in left_out}
    most = context.believed(MessageType.TRAIN)
    if all(max(counts[name], total - counts[name]) >= most for name in sent):
        fleet.first_arrays = {}
        _say_left_out(context, left_out)
    return [reply for reply in replies if _takes_part(context, reply)]


def _say_left_out(context: Exchange, names: list[str]) -> None:
    """Log once which arrays keep their value."""
    if not names:
        return
    listed = ", ".join(_brief(names)) + (", ..." if names[MOST_NAMES:] else "")
    text = f"{len(names)} of {len(context.arrays)} arrays are not returned by nodes and keep "
    text += clean(f"their value: {listed}")
    if context.fleet.is_first(text):
        log(INFO, "%s", text)


def _takes_part(context: Exchange, reply: Message) -> bool:
    """Take out of a reply what most nodes leave out; drop it if it lacks what most return."""
    fleet = context.fleet
    model = model_of(reply)
    left_out = context.left_out
    if lacking := context.arrays.keys() - left_out.keys() - model.keys():
        context.drop(reply, f"it leaves out arrays {_brief(lacking)}, which most nodes return")
        return False
    if not (extra := left_out.keys() & model.keys()):
        return True
    if len(extra) == len(model):
        text = f"most nodes leave out all that it returns, of initial_arrays {_brief(left_out)}"
        context.drop(reply, text)
        return False
    ((name, _),) = arrays_in(reply.content).items()
    reply.content[name] = ArrayRecord({n: a for n, a in model.items() if n not in extra})
    node_id = reply.metadata.src_node_id
    # A node is named once, because its app returns them each time.
    if not fleet.first_arrays and fleet.is_first(f"arrays of {context.identity(node_id)}"):
        text = f"returns arrays {_brief(extra)}, which most nodes leave out and which do not count"
        context.note(node_id, text)
    return True


def _brief(names: Iterable[str]) -> list[str]:
    return sorted(names)[:MOST_NAMES]
