"""What nodes must do for a method, and the lines that do it; when a run ends as none does its part.

That needs most of the nodes that were asked: never a few, which may just be the first to answer.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import NODE_UNAVAILABLE, log
from flwr_hetero.errors import with_hint
from flwr_hetero.exchange.context import Exchange, Standstill
from flwr_hetero.records import metrics_in
from flwr_hetero.server.composition import name_of

MOD_LINES = """\
    from flwr_hetero.mod import hetero
    app = ClientApp(mods=[hetero])"""
STEP_LINES = {
    "transformers": """\
    # before trainer.train(), of a Trainer with num_train_epochs=1
    loader = hetero.batches(trainer.get_train_dataloader(), msg)
    trainer.get_train_dataloader = lambda: loader""",
    "lightning": """\
    loader = hetero.batches(loader, msg)  # takes the steps that the server asks for
    trainer.fit(model, loader)  # a Trainer with max_epochs=1""",
    "torch": """\
    loader = hetero.batches(loader, msg)  # takes the steps that the server asks for""",
    "sklearn": """\
    # before model.fit(X, y); or so many times model.partial_fit(X, y)
    model.max_iter = hetero.num_steps(msg, default=model.max_iter, batch_size=len(X))""",
    "numpy": """\
    # in place of the app's own number of steps, here 100 with batches of 32
    for _ in range(hetero.num_steps(msg, default=100, batch_size=32)):""",
}
"""How an app takes the steps that the server asks for: frameworks that build on others first."""
MAX_NAMES = 10
"""Nodes that a warning names."""
FRUITLESS_ROUNDS, FRUITLESS_REPLIES = 2, 12
"""Rounds and, once one has counted, replies in a row that do not count, which end a run."""
MOST_ROUNDS = 20
"""Rounds in a row in which no reply counts that end a run, however few nodes are asked."""
TYPES = {"training": MessageType.TRAIN, "evaluation": MessageType.EVALUATE}


class ClientSupport(NamedTuple):
    """What a reply must hold: a metric or a record of this name, its meaning, and lines to add.

    ``without`` says what becomes of nodes that leave it out while others do not, ``way_out`` what
    else can be done. Without ``lines`` they are those for steps, in the framework at hand.
    """

    key: str
    meaning: str
    lines: str
    without: str
    way_out: str = "leave out"


class NoProgressError(RuntimeError):
    """No reply has counted for a while."""


class MissingClientSupportError(RuntimeError):
    """No node does its part of a method, which would have no effect or do harm."""


STEPS = ClientSupport(keys.NUM_STEPS, "steps that the node took", "", "which count least")
"""What nodes must do for any wrapper that decides the steps."""
TIMES = ClientSupport(
    keys.TIMING,
    "how long the node took",
    MOD_LINES,
    "which are taken for equally fast",
    "set num_tiers=1 of",
)
"""What nodes must do in a simulation, where the server's clock sees the wait for a worker."""


def holds(reply: Message, key: str) -> bool:
    """Return whether a reply has a record or a metric of a name."""
    records = metrics_in(reply.content).values()
    return key in reply.content or any(key in record for record in records)


def check_client_support(wrapper: Any, context: Exchange, replies: Sequence[Message]) -> None:
    """Raise if no node does its part, warn of some that do not; once that is clear, never again."""
    for support in wrapper.client_support:
        if support.key in wrapper.clear:
            continue
        found = {r.metadata.src_node_id: wrapper.has_support(context, r, support) for r in replies}
        lacking: dict[int, str] = wrapper.lacking.setdefault(support.key, {})
        lacking |= {n: context.identity(n) for n, has in found.items() if has is False}
        num_with = sum(map(bool, found.values()))
        # One node that does shows that the app can. Replies that do not tell will never tell.
        never = bool(found) and all(has is None for has in found.values())
        # If none does, most of the nodes asked must show it: a few may be just the first to answer.
        if num_with or never or len(lacking) >= context.believed():
            wrapper.clear.add(support.key)
            if lacking and not never:
                tell_missing(name_of(wrapper), support, [*lacking.values()], num_with)


def tell_missing(owner: str, support: ClientSupport, names: Sequence[str], num_with: int) -> None:
    """Warn that some nodes lack what others have; raise if none has it."""
    key, meaning, lines, without, way_out = support
    lines = lines or step_lines()
    if not num_with:
        raise MissingClientSupportError(
            f"{owner}: no node reports {key!r} ({meaning}), so {owner} has no effect. "
            f"Add to the ClientApp:\n{lines}\nor {way_out} {owner}."
        )
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    counts = f"from {len(names)} of {len(names) + num_with} nodes, {without}: {shown}"
    log(WARNING, "%s: no %r (%s) %s. Lines for the node:\n%s", owner, key, meaning, counts, lines)


def step_lines() -> str:
    """Return the lines for steps in the framework at hand."""
    loaded = [name for name in STEP_LINES if {name, f"pytorch_{name}"} & sys.modules.keys()]
    return f"{MOD_LINES}\n{STEP_LINES[loaded[0]]}"


# --- replies that do not count ---------------------------------------------------------------
def check_progress(context: Exchange, of: str = "training") -> None:
    """Stop a run in which no reply has counted for a while, of enough nodes."""
    book = context.fleet.standstill[of]
    if context.counted:
        context.fleet.standstill[of] = Standstill(begun=True)
    away = f"error {NODE_UNAVAILABLE}:"
    if context.counted or all(why.startswith(away) for why in context.failed.values()):
        return
    book.add(context.failed, context.refused)
    reasons = Counter(book.failed[node] for node in book.refused) if context.refused else Counter()
    reason, count = reasons.most_common(1)[0] if reasons else ("", 0)
    believed = context.believed(TYPES[of])
    # The same reason ends the run in the first round, or in the second if replies have counted.
    if count >= max(believed, len(book.refused) / 2) and (book.rounds > 1 or not book.begun):
        nodes = sorted(context.identity(n) for n in book.refused if book.failed[n] == reason)
        share = "all" if count == len(book.refused) else f"{count} of {len(book.refused)}"
        text = f"no reply to {of} counts, {share} for the same reason: {reason} "
        raise NoProgressError(with_hint(f"{text}({', '.join(nodes[:5])})."))
    enough = book.replies >= FRUITLESS_REPLIES or not book.begun
    of_most = len(book.failed) >= believed and book.rounds >= FRUITLESS_ROUNDS and enough
    if of == "training" and (
        of_most or (book.rounds >= MOST_ROUNDS and len(book.failed) >= context.quorum)
    ):
        reasons_of = [f"{context.identity(n)}: {why}" for n, why in sorted(book.failed.items())[:5]]
        text = f"no reply to training has counted in {book.rounds} rounds in a row"
        raise NoProgressError(with_hint(f"{text}: {'; '.join(reasons_of)}."))
