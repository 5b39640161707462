"""What nodes must do for a method, and the lines that do it; a run ends if none does its part.

That needs most of the nodes that were asked: never a few, which may just be the first to answer.
"""

import sys
from collections.abc import Sequence
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.exchange.context import Exchange
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
