r"""Updates judged by their size: one far longer than those of most nodes counts little.

.. math:: \ell_i = c \, \operatorname{median}_j \left( \lVert d_j \rVert
          \max\left(1, \sqrt{\tau_i / \tau_j}\right) \right), \qquad
          d_i \leftarrow \min\left(1, \frac{\ell_i}{\lVert d_i \rVert}\right)^2 d_i

d_j: the last update of node j; tau_j: its assigned steps, or 1; c: the wrapper's ``update_limit``.
Of a node that claims far more examples than most, which weigh its update, the limit is shorter.
More steps may make an update longer, but fewer need not make it shorter: a slow node may hold what
no other does. By the square a lie counts the less, the larger it is.
"""

from collections.abc import Collection, Sequence
from logging import INFO
from math import inf, sqrt
from statistics import median_low

from flwr.app import ArrayRecord, Message, MessageType

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_number
from flwr_hetero.records import arrays_in, steps_that_count
from flwr_hetero.server.aggregate import Norms, model_norms, with_update
from flwr_hetero.server.context import QUORUM, Exchange

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


def check_limit(limit: float | None) -> float | None:
    """Check how many medians long an update may be."""
    if limit is None:
        return None
    return check_number("update_limit", limit, "[1, inf)", "or None, for no limit")


def limit_updates(
    context: Exchange, good: Sequence[Message], limit: float, weight_key: str | None = None
) -> list[Message]:
    """Shorten updates that are far longer than the last ones of most nodes; drop diverged ones."""
    if not good:
        return []
    nodes = [context.identity(reply.metadata.src_node_id) for reply in good]
    asked = [context.instruction_of(reply) for reply in good]
    starts = [_model(message) for message in asked]
    norms = [model_norms(_model(r), start) for r, start in zip(good, starts, strict=True)]
    steps = [steps_that_count(*each) for each in zip(asked, good, strict=True)]
    known = context.fleet.norms
    still = [STILL * max(norm, SMALL) for norm in model_norms(starts[0])]
    for node, own, count in zip(nodes, norms, steps, strict=True):
        # the last one of each node, so that quick ones do not set what is usual
        known.pop(node, None)
        parameters, statistics = (o if o > s else 0.0 for o, s in zip(own, still, strict=True))
        known[node] = (parameters, statistics, count)
    recent = max(RECENT_NODES, RECENT_UPDATES * len(good))
    context.fleet.norms = known = dict([*known.items()][-recent:])
    is_first = len(known) < QUORUM
    # a fleet of one or two has none to compare with
    if is_first and context.quorum < QUORUM:
        return list(good)
    few = sum(parameters > 0 for parameters, *_ in known.values()) < QUORUM
    early = context.fleet.is_early(len(known), MessageType.TRAIN)
    most = {count: longest_update(known.values(), count, limit, early) for count in {*steps}}
    claims = context.fleet.examples.get(MessageType.TRAIN, {}) if weight_key else {}
    heavy = HEAVY * usual_of([last for _, last in claims.values() if last] or [inf], early)
    counted = []
    for reply, node, start, own, count in zip(good, nodes, starts, norms, steps, strict=True):
        share = min(1.0, heavy / claims[node][1]) if claims.get(node, (0, 0))[1] else 1.0
        longest = most[count]
        if few:
            # before others are known to move, the norm of the model stands for the median
            own_size = limit * max(model_norms(start).parameters, SMALL)
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


def usual_of(values: Sequence[float], early: bool = False) -> float:
    """Return the median; early, as most of the first few may lie, at most twice the low quartile.

    >>> usual_of([1.0, 2.0, 9.0, 9.0, 9.0]), usual_of([1.0, 2.0, 9.0, 9.0, 9.0], early=True)
    (9.0, 4.0)
    """
    most = 2 * sorted(values)[(len(values) - 1) // 4] if early else inf
    return min(median_low(values), most)


def longest_update(
    known: Collection[Known], steps: float, limit: float, early: bool = False
) -> Norms:
    """Return the longest that an update of so many steps may be; 0 where that is unknown.

    >>> longest_update([(1.0, 0.0, 1), (2.0, 0.0, 4), (3.0, 0.0, 9)], steps=4, limit=2)
    Norms(parameters=4.0, statistics=0.0)
    """
    longest = []
    for part in range(2):
        # those that did not move say nothing of how far others may
        each = [own[part] * max(1.0, sqrt(steps / own[2])) for own in known if own[part]]
        longest.append(limit * usual_of(each or [0.0], early))
    return Norms(*longest)


def parts_that_count(own: Norms, most: Norms) -> Norms:
    """Return the parts of an update's length that count, of parameters and of statistics.

    >>> parts_that_count(Norms(8.0, 1.0), most=Norms(4.0, 2.0))
    Norms(parameters=0.25, statistics=1.0)
    """
    pairs = zip(own, most, strict=True)
    return Norms(*(min(1.0, limit / norm) ** 2 if norm and limit else 1.0 for norm, limit in pairs))


def _model(message: Message) -> ArrayRecord:
    return next(iter(arrays_in(message.content).values()))


def _say(context: Exchange, node: str, part: float) -> None:
    """Log that an update was cut, once."""
    if CUT_UPDATES not in context.fleet.cut:
        context.fleet.cut.add(CUT_UPDATES)
        text = (
            "%s: its update is longer than most and counts with %.2g of its length (update_limit; "
        )
        log(INFO, f"{text}Recorded keeps all in shortened)", node, part)
