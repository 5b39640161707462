"""What a strategy needs from the nodes, and whether the first replies hold it."""

from collections.abc import Sequence
from logging import WARNING
from typing import NamedTuple

from flwr.app import Message

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_choice

ON_MISSING = ("raise", "warn")
MAX_NAMES = 10
"""Nodes that a warning names."""


class Contract(NamedTuple):
    """What a reply must hold: a metric or a record of this name; its meaning; lines to add."""

    key: str
    meaning: str
    lines: str


class MissingHelpError(RuntimeError):
    """No node does its part of a method, which would have no effect or do harm."""


def check_on_missing(on_missing: str) -> str:
    """Refuse what is no way to treat missing help."""
    check_choice("on_missing", on_missing, ON_MISSING)
    return on_missing


def holds(reply: Message, key: str) -> bool:
    """Return whether a reply has a record or a metric of a name."""
    records = reply.content.metric_records.values()
    return key in reply.content or any(key in record for record in records)


def check_help(
    owner: str, contract: Contract, silent: Sequence[str], num_replies: int, on_missing: str
) -> None:
    """Raise or warn if replies lack what the contract asks for; ``silent`` are their nodes."""
    if not silent:
        return
    names = ", ".join(silent[:MAX_NAMES]) + (", ..." if len(silent) > MAX_NAMES else "")
    if len(silent) < num_replies:
        text = "%s: no %r (%s) from %d of %d nodes, which count least: %s. Lines for the node:\n%s"
        some = (owner, contract.key, contract.meaning, len(silent), num_replies, names)
        log(WARNING, text, *some, contract.lines)
        return
    text = (
        f"{owner}: no node reports {contract.key!r} ({contract.meaning}), so {owner} has no "
        f"effect. Add to the ClientApp:\n{contract.lines}\n"
    )
    if on_missing == "raise":
        raise MissingHelpError(f'{text}or pass on_missing="warn" to {owner}.')
    log(WARNING, text)
