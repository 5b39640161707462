r"""What counts of models beside those of most nodes: by the size of updates, and of which arrays.

An update that is far longer than most are, and than most have ever been, counts little:

.. math:: m_i(t) = \operatorname{median}_j \left( \lVert d_j \rVert
          \max\left(1, \sqrt{\tau_i / \tau_j}\right) \right), \qquad
          \ell_i = \max\left(c \, m_i(t), \max_{s < t} m_i(s)\right), \qquad
          d_i \leftarrow \min\left(1, \frac{\ell_i}{\lVert d_i \rVert}\right)^2 d_i

d_j: the last update of node j; tau_j: its assigned steps, or 1; c: the wrapper's ``update_limit``.
Once most nodes have converged, their updates are short. A few nodes with other data have longer
ones, and must not lose their vote for that. No node can tell these from liars that go as far.
Of a node that claims far more examples than most, which weigh its update, the limit is shorter.
More steps may make an update longer, but fewer need not make it shorter: a slow node may hold what
no other does. By the square a lie counts the less, the larger it is.

Models of which nodes return a part, as of LoRA: by its last reply each node has a vote on each
array. One that half of the nodes or more leave out keeps the server's value, to the bit. A reply
without an array that most return is dropped, and what most leave out is taken out of a reply.
"""

from collections.abc import Collection, Iterable, Sequence
from logging import INFO
from math import sqrt
from statistics import median_low
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_number, clean
from flwr_hetero.exchange.aggregate import (
    Norms,
    aggregate,
    model_norms,
    model_of,
    with_model,
    with_update,
)
from flwr_hetero.exchange.context import QUORUM, Exchange
from flwr_hetero.figures import usual_of
from flwr_hetero.records import arrays_in, steps_that_count

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
CUT_UPDATES = "updates"
"""Among what was cut: that an update was, which is said once."""
Known = tuple[float, float, float]
"""Of a node's last update: norms of its parameters and running statistics, 0 where these did not
move, and steps."""
STILL_UPDATE: Known = (0.0, 0.0, 1.0)
"""The update of a node that does not move."""
MOST_NAMES = 3
"""Arrays that a reason or a log line names."""


def check_limit(limit: float | None) -> float | None:
    """Check how many medians long an update may be."""
    if limit is None:
        return None
    return check_number("update_limit", limit, "[1, inf)", "or None, for no limit")


class Measured(NamedTuple):
    """Good replies with the lengths of their updates, and the steps that they were asked for."""

    replies: Sequence[Message]
    nodes: list[str]
    starts: list[ArrayRecord]
    """The models that the nodes were sent."""
    norms: list[Norms]
    steps: list[float]


def measure_updates(context: Exchange, good: Sequence[Message]) -> Measured:
    """Measure updates, and remember those of each node and what is usual."""
    fleet = context.fleet
    known = context.fleet.norms
    nodes = [context.identity(reply.metadata.src_node_id) for reply in good]
    asked = [context.instruction_of(reply) for reply in good]
    starts = [model_of(message) for message in asked]
    norms = [model_norms(model_of(r), start) for r, start in zip(good, starts, strict=True)]
    steps = [float(steps_that_count(*each)) for each in zip(asked, good, strict=True)]
    still = [STILL * max(norm, SMALL) for norm in model_norms(_part_of(starts[0], good[0]))]
    for node, own, count in zip(nodes, norms, steps, strict=True):
        # The last update of each node counts, so that fast nodes do not set what is usual.
        known.pop(node, None)
        parameters, statistics = (o if o > s else 0.0 for o, s in zip(own, still, strict=True))
        known[node] = (parameters, statistics, count)
    recent = max(RECENT_NODES, RECENT_UPDATES * len(good))
    fleet.norms = dict([*known.items()][-recent:])
    if len(known) >= QUORUM and not fleet.is_early(len(known), MessageType.TRAIN):
        fleet.most_usual = longer_of(fleet.most_usual, usual_update(fleet.norms.values()))
    return Measured(good, nodes, starts, norms, steps)


def limit_updates(
    context: Exchange, found: Measured, limit: float, weight_key: str | None = None
) -> list[Message]:
    """Shorten updates that are far longer than those of most nodes were; drop diverged ones."""
    known = context.fleet.norms
    good = found.replies
    is_first = len(known) < QUORUM
    # A fleet of one or two nodes has none to compare with.
    if is_first and context.quorum < QUORUM:
        return list(good)
    few = sum(parameters > 0 for parameters, *_ in known.values()) < QUORUM
    early = context.fleet.is_early(len(known), MessageType.TRAIN)
    before = context.fleet.most_usual
    most = {
        count: longest_update([*known.values()], count, limit, early, before)
        for count in {*found.steps}
    }
    claims = context.fleet.examples.get(MessageType.TRAIN, {}) if weight_key else {}
    usual_claim, _ = context.fleet.usual_claim(MessageType.TRAIN, early)
    heavy = HEAVY * usual_claim
    counted = []
    for reply, node, start, own, count in zip(*found, strict=True):
        share = min(1.0, heavy / claims[node][1]) if claims.get(node, (0, 0))[1] else 1.0
        longest = most[count]
        if few:
            # Before others are known to move, the norm of the model stands for the median.
            own_size = limit * max(model_norms(_part_of(start, reply)).parameters, SMALL)
            longest = Norms(own_size, 0.0 if is_first else longest.statistics)
        parts = parts_that_count(own, Norms(*(share * norm for norm in longest)))
        if (part := min(parts)) < DIVERGED**-2 and not few:
            context.drop(reply, f"its update is {part**-0.5:.3g} times as long as it may be")
            continue
        if part < 1:
            reply = with_update(reply, start, start, parts[0], scale_of_buffers=parts[1])
            context.shortened[node] = part
            _say(context, node, part)
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


def _part_of(start: ArrayRecord, reply: Message) -> dict[str, Array]:
    """Return what a node was sent of the arrays that it returns."""
    return {name: start[name] for name in model_of(reply)}


def _say(context: Exchange, node: str, part: float) -> None:
    """Log that an update was cut, once."""
    if CUT_UPDATES not in context.fleet.cut:
        context.fleet.cut.add(CUT_UPDATES)
        text = (
            "%s: its update is longer than most and counts with %.2g of its length (update_limit; "
        )
        log(INFO, f"{text}Recorded keeps all in shortened)", node, part)


# --- models of which nodes return a part -----------------------------------------------------
def keep_common(context: Exchange, replies: Sequence[Message]) -> list[Message]:
    """Keep replies that have what most nodes return; take out of them what most leave out."""
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
        _say_left_out(context, len(sent))
    return [reply for reply in replies if _takes_part(context, reply)]


def _takes_part(context: Exchange, reply: Message) -> bool:
    """Take out of a reply what most nodes leave out; drop it if it lacks what most return."""
    model = model_of(reply)
    left_out = context.left_out
    if lacking := context.arrays.keys() - left_out.keys() - model.keys():
        text = f"it leaves out arrays {_brief(lacking)}, which most nodes return"
        context.drop(reply, text)
        return False
    if not (extra := left_out.keys() & model.keys()):
        return True
    if len(extra) == len(model):
        text = f"most nodes leave out all that it returns, of initial_arrays {_brief(left_out)}"
        context.drop(reply, text)
        return False
    ((name, _),) = arrays_in(reply.content).items()
    reply.content[name] = ArrayRecord({n: a for n, a in model.items() if n not in extra})
    # A node is named once, because its app returns them each time.
    node = f"arrays of {context.identity(reply.metadata.src_node_id)}"
    if node not in context.fleet.cut and not context.fleet.first_arrays:
        context.fleet.cut.add(node)
        text = f"returns arrays {_brief(extra)}, which most nodes leave out and which do not count"
        context.note(reply.metadata.src_node_id, text)
    return True


def aggregate_parts(
    inner: Strategy, leaf: Strategy, context: Exchange, replies: list[Message], weights: list[float]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate what nodes return; it sees whole models, and so does all else."""
    if context.left_out:
        replies = [_whole(context, reply) for reply in replies]
    arrays, metrics = aggregate(inner, leaf, context, replies, weights)
    return arrays and with_left_out(arrays, context), metrics


def with_left_out(arrays: ArrayRecord, context: Exchange) -> ArrayRecord:
    """Give arrays that nodes leave out the server's value: a mean of equal ones may round it."""
    for name, array in context.left_out.items():
        arrays[name] = array
    return arrays


def _whole(context: Exchange, reply: Message) -> Message:
    """Complete a reply with the server's arrays, which are not copied, in their order."""
    whole = context.arrays.copy()
    whole.update(context.left_out)
    whole.update(model_of(reply))
    return with_model(reply, whole)


def _say_left_out(context: Exchange, num_arrays: int) -> None:
    """Log once which arrays keep their value."""
    if not context.left_out:
        return
    names = ", ".join(sorted(context.left_out)[:MOST_NAMES])
    more = ", ..." if len(context.left_out) > MOST_NAMES else ""
    text = f"{len(context.left_out)} of {num_arrays} arrays are not returned by nodes and keep "
    text += clean(f"their value: {names}{more}")
    if text not in context.fleet.cut:
        context.fleet.cut.add(text)
        log(INFO, "%s", text)


def _brief(names: Iterable[str]) -> list[str]:
    return sorted(names)[:MOST_NAMES]
