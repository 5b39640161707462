"""One call of a ClientApp's function: what it uses, for our mods to look at when it returns."""

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Handler:
    """One call of a ClientApp's function, with a message and the node's context."""

    message: Any
    context: Any
    # samplers that were iterated; those kept, by name, with the context that keeps their state
    used: list[Any] = field(default_factory=list)
    kept: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    # samplers that follow the server and answer it; those that our loaders made
    led: list[Any] = field(default_factory=list)
    made: dict[Any, Any] = field(default_factory=dict)
    # Counts the message's steps, if our loaders are used.
    work: Any = None
    # What torch objects of the app hand on to the next message.
    carried: Any = None
    has_saved: bool = False  # whether the function saves states by itself


CURRENT: ContextVar[Handler | None] = ContextVar("handler", default=None)
current_handler = CURRENT.get
"""Returns the call in which this code runs; None without one of our mods."""

MOD = "add to the ClientApp: from flwr_hetero.mod import hetero; app = ClientApp(mods=[hetero])"
"""Hint where there is none."""
_said: set[str] = set()


def say_once(text: str, about: str = "") -> None:
    """Log a warning, once in this process for what it is ``about``, else for the text."""
    if (about or text) not in _said:
        _said.add(about or text)
        logging.getLogger("flwr").warning(text)
