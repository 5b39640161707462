"""What a ClientApp's function used while it ran: our mods look at it when it returns."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

RECORDS = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Makes records for the reply, by name."""
_said: set[str] = set()


class Used(Protocol):
    """A sampler, as seen from here."""

    learns: bool

    def settle(self) -> None:
        """Give back what was drawn ahead."""

    def check_help(self) -> None:
        """Raise if the training loop left out what the sampler needs."""


class Work(Protocol):
    """What counts the steps of a message, as seen from here."""

    def finish(self) -> Mapping[str, Mapping[str, Any]]:
        """Keep where the node is; return the records for the reply."""


class Handler:
    """One call of a ClientApp's function, with a message and the node's context.

    ``saves`` and ``records`` are of samplers, by id; ``work`` counts the message's steps, and
    ``made`` has the samplers that our loaders made for it.
    """

    def __init__(self, message: Any = None, context: Any = None) -> None:
        self.message, self.context = message, context
        self.used: list[Used] = []
        self.saves: dict[int, Callable[[], None]] = {}
        self.records: dict[int, RECORDS] = {}
        self.made: dict[Any, Any] = {}
        self.work: Work | None = None
        self.has_saved = False

    def use(self, sampler: Used) -> None:
        """Note a sampler that was iterated."""
        if all(sampler is not other for other in self.used):
            self.used.append(sampler)

    def finish(self, *, trained: bool) -> dict[str, Mapping[str, Any]]:
        """Check and save the samplers; return the records for the reply."""
        for sampler in self.used:
            sampler.settle()
            if trained:
                sampler.check_help()
        makers = self.records.values()
        found = {name: record for make in makers for name, record in make().items()}
        if trained and self.work is not None:
            found |= self.work.finish()
        for save in self.saves.values():
            save()
        for sampler in self.used:
            if trained and sampler.learns and not (self.saves or self.has_saved):
                say_once(
                    f"{type(sampler).__name__} was used but not kept: what it learns is lost after "
                    "each round; add: loader = hetero.batches(loader, msg), or without it: "
                    "keep(loader.batch_sampler, context)"
                )
        return found


_current: ContextVar[Handler | None] = ContextVar("handler", default=None)


def current_handler() -> Handler | None:
    """Return the call in which this code runs; None without one of our mods."""
    return _current.get()


@contextmanager
def handling(message: Any = None, context: Any = None) -> Iterator[Handler]:
    """Run a ClientApp's function on a message and note what it uses."""
    token = _current.set(handler := Handler(message, context))
    try:
        yield handler
    finally:
        _current.reset(token)


def say_once(text: str) -> None:
    """Log a warning, once in this process."""
    if text not in _said:
        _said.add(text)
        logging.getLogger("flwr").warning(text)
