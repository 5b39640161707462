"""Which replies count, and when a run ends because none does."""

from collections import Counter
from collections.abc import Sequence

from flwr.app import Message

from flwr_hetero._flwr import NODE_UNAVAILABLE
from flwr_hetero.errors import cure_for, with_cure
from flwr_hetero.server.context import Exchange, is_enough
from flwr_hetero.server.node_half.work import settle_metrics
from flwr_hetero.server.reply_checks import (
    Expected,
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


def accept(context: Exchange, replies: Sequence[Message], expected: Expected) -> list[Message]:
    """Return the good replies, sorted by node identity; record the others as failures."""
    good = []
    waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in context.messages}
    for reply in replies:
        node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
        if node_id is None:
            context.note(reply.metadata.src_node_id, "reply to a message that is not open")
            continue
        context.fleet.nodes.heard_of(node_id)
        if is_good(context, reply, node_id, expected):
            good.append(reply)
    if context.enough is not None and is_enough(replies, context.enough):
        context.surplus = [m for m in context.messages if m.metadata.message_id in waiting]
        waiting = {}
    for node_id in waiting.values():
        context.fail(node_id, f"no reply within {context.timeout_s:g} s")
        if expected.metrics:  # a node that is away when it is to be timed is not asked again
            context.fleet.nodes.kept_silent(
                node_id, context.fleet.clock.virtual_s, context.timeout_s
            )
    good.sort(key=lambda reply: context.fleet.nodes.sort_key(reply.metadata.src_node_id))
    if expected.metrics and good:
        good = _same_metrics(context, good)
        _limit_examples(context, good, expected.weight_key)
    return good if expected.arrays is None else _same_size(context, good, expected)


def is_good(context: Exchange, reply: Message, node_id: int, expected: Expected) -> bool:
    """Check a reply of a node, once; learn its latency, or record it as a failure."""
    message_id = reply.metadata.reply_to_message_id
    if message_id in context.checked:
        return True
    reason = why_bad(reply, expected)
    if not reason and reply.metadata.src_node_id != node_id:
        reason = "it names another node as its source"
    if reason := reason or _why_late(context, reply, node_id):
        known = expected.arrays is not None and cure_for(reason)
        told = reply.has_content() or known  # else it may work the next time
        context.fail(node_id, reason, message_id if told else None)
        return False
    context.checked.add(message_id)
    return True


def count(context: Exchange, replies: list[Message], weight_key: str | None) -> list[Message]:
    """Note whose replies go to the innermost strategy; none if their weights sum to 0."""
    if weight_key and not any(weight_of(reply, weight_key) for reply in replies):
        for reply in replies:  # Flower would divide by the sum
            context.drop(reply, f"{weight_key} is 0 in all replies")
        replies = []
    context.counted = [context.identity(r.metadata.src_node_id) for r in replies]
    return replies


def check_progress(context: Exchange, of: str = "training") -> None:
    """Stop a run whose replies are dropped for the same reason, so that none counts.

    In the first round; later in the second one, and in none before enough nodes have it.
    """
    fleet, before = context.fleet, context.fleet.refused.get(of, {})
    if of == "training":
        _check_fruitless(context)
    if context.counted:
        fleet.counting.add(of)
        fleet.refused[of] = {}
    if context.counted or not context.refused:
        return
    fleet.refused[of] = refused = before | context.refused
    ((reason, count),) = Counter(refused.values()).most_common(1)
    enough = count >= max(context.quorum, len(refused) / 2)
    if enough and (before or of not in fleet.counting):
        nodes = [context.identity(n) for n, why in refused.items() if why == reason]
        share = "all" if count == len(refused) else f"{count} of {len(refused)}"
        text = f"no reply to {of} counts, {share} for the same reason: {reason} "
        raise RuntimeError(with_cure(f"{text}({', '.join(sorted(nodes)[:5])})."))


def _check_fruitless(context: Exchange) -> None:
    """Stop a run in which no reply has counted for a while, of enough nodes."""
    fleet, failures = context.fleet, dict(context.failed)
    if context.counted:
        fleet.in_vain.clear()
    elif any(not why.startswith(AWAY) for why in failures.values()):
        fleet.in_vain.append(failures)
    reasons = {node: why for failed in fleet.in_vain for node, why in failed.items()}
    rounds, replies = len(fleet.in_vain), sum(map(len, fleet.in_vain))
    enough = replies >= FRUITLESS_REPLIES or not fleet.begun
    if rounds >= FRUITLESS_ROUNDS and enough and len(reasons) >= context.quorum:
        told = "; ".join(f"{node}: {why}" for node, why in sorted(reasons.items())[:5])
        text = f"no reply to training has counted in {rounds} rounds in a row"
        raise RuntimeError(with_cure(f"{text}: {told}."))


def _why_late(context: Exchange, reply: Message, node_id: int) -> str | None:
    """Learn a reply's partition and latency; return why it came too late, if it did."""
    partition, nodes = reported_partition(reply), context.fleet.nodes
    if partition is not None:
        nodes.set_partition_id(node_id, partition)
    round_trip_s = context.round_trip_s.get(reply.metadata.reply_to_message_id)
    latency, complaint = judge_latency(
        reply, round_trip_s, simulated=context.simulated, same_clock=context.same_clock
    )
    if complaint:
        nodes.warn(node_id, f"latency not believed: {complaint}")
    settle_metrics(reply)
    if latency is None:
        return None
    context.fleet.clock.emulated |= latency.emulated
    if latency.emulated and latency.seconds > context.timeout_s:
        return f"late: {latency.seconds:.3g} s, the time-out is {context.timeout_s:g} s"
    context.latency[reply.metadata.reply_to_message_id] = latency
    return None


def _same_metrics(context: Exchange, good: list[Message]) -> list[Message]:
    """Drop replies whose metrics have other names than those of the majority."""
    accepted = context.fleet.accepted.setdefault(context.messages[0].metadata.message_type, {})
    names = [metric_names(reply) for reply in good]
    usual, kept = usual_metrics(names, accepted), []
    for reply, name in zip(good, names, strict=True):
        if name == usual:
            kept.append(reply)
        else:
            context.drop(reply, "its metrics have other names than those of the others")
    accepted[usual] = accepted.get(usual, 0) + len(kept)
    return kept


def _same_size(context: Exchange, good: list[Message], expected: Expected) -> list[Message]:
    """Drop replies whose models are far larger than the model sent and those of others."""
    if not good or expected.arrays is None:
        return good
    sent, kept = norms_of(expected.arrays), []
    found = [norms_of(next(iter(reply.content.array_records.values()))) for reply in good]
    nodes = [reply.metadata.src_node_id for reply in good]
    everybody = context.fleet.norms | dict(zip(nodes, found, strict=True))
    reasons = why_too_large(found, sent, list(everybody.values()))
    for reply, node_id, own, reason in zip(good, nodes, found, reasons, strict=True):
        if reason:
            context.drop(reply, reason)
        else:
            kept.append(reply)
            context.fleet.norms[node_id] = own
    return kept


def _limit_examples(context: Exchange, good: list[Message], weight_key: str | None) -> None:
    """Cut down what nodes say of their number of examples, by which they count."""
    if weight_key is None:
        return
    kind = context.messages[0].metadata.message_type
    known = context.fleet.examples.setdefault(kind, {})
    for reply in good:
        claim = weight_of(reply, weight_key)
        name = context.identity(reply.metadata.src_node_id)
        known[name] = known.get(name, (claim, claim))[0], claim
    usual = usual_examples(last for _, last in known.values())
    for reply in good:
        name = context.identity(reply.metadata.src_node_id)
        said, claim = known[name][0], weight_of(reply, weight_key)  # a merge may hold several
        if claim <= (most := most_examples(said, usual)):
            continue
        for metrics in reply.content.metric_records.values():
            metrics[weight_key] = int(most) if isinstance(metrics[weight_key], int) else most
        known[name] = said, most
        if name not in context.fleet.cut:
            context.fleet.cut.add(name)
            text = f"claims {claim:g} {weight_key}, counts as {most:g}"
            context.note(reply.metadata.src_node_id, text)
