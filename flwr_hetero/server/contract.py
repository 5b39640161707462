"""What a strategy needs from the nodes, and whether their first replies hold it."""

from collections.abc import Mapping
from logging import WARNING
from typing import NamedTuple

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import check_choice

ON_MISSING = ("raise", "warn")
MAX_NAMES = 10
"""Nodes that a warning names."""


class Contract(NamedTuple):
    """What a reply must hold: a metric or a record of this name; its meaning; lines to add.

    ``without`` says what becomes of nodes that leave it out while others do not.
    """

    key: str
    meaning: str
    lines: str
    without: str


STEPS = Contract(
    keys.NUM_STEPS,
    "steps that the node took",
    "    from flwr_hetero.mod import StepLoader\n"
    "    loader = StepLoader(loader, msg)  # takes the steps that the server asks for\n"
    '    metrics = MetricRecord({"num-examples": ..., **loader.metrics})',
    "which count least",
)
"""What nodes must do for any wrapper that decides the steps."""


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


class HelpCheck:
    """Find out once whether the nodes keep a contract.

    One node that does shows that the app can. That none does is believed of as many nodes as
    are enough to be no fault of theirs, in one round or over several.
    """

    def __init__(self, owner: str, contract: Contract, on_missing: str) -> None:
        self.owner, self.contract, self.on_missing = owner, contract, on_missing
        self.silent: dict[int, str] = {}
        self.done = False

    def see(self, silent: Mapping[int, str], num_helping: int, enough: int) -> None:
        """Raise or warn, once that is clear; ``silent`` are names of nodes without it, by id."""
        self.silent |= silent
        self.done = num_helping > 0 or len(self.silent) >= enough
        if not (self.done and self.silent):
            return
        key, meaning, lines, without = self.contract
        if num_helping:
            names = list(self.silent.values())
            log(
                WARNING,
                "%s: no %r (%s) from %d of %d nodes, %s: %s. Lines for the node:\n%s",
                *(self.owner, key, meaning, len(names), len(names) + num_helping, without),
                ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else ""),
                lines,
            )
            return
        text = (
            f"{self.owner}: no node reports {key!r} ({meaning}), so {self.owner} has no "
            f"effect. Add to the ClientApp:\n{lines}\n"
        )
        if self.on_missing == "raise":
            raise MissingHelpError(f'{text}or pass on_missing="warn" to {self.owner}.')
        log(WARNING, text)
