"""Flower's node from inside: the places that a warm node takes. Tried with flwr 1.41.0."""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

from flwr_hetero._flwr import TRIED_WITH


def why_untried() -> str:
    """Return why the places below may not be there; "" in the versions that were tried."""
    found = version("flwr")
    # patch releases keep them
    is_tried = found.split(".")[:2] == TRIED_WITH.split(".")[:2]
    return "" if is_tried else f"flwr is {found}, the warm one was tried with {TRIED_WITH}"


def run_command(name: str) -> None:
    """Run one of Flower's commands in this process, with its arguments."""
    (command,) = entry_points(group="console_scripts", name=name)
    sys.argv[0] = name
    command.load()()


# --- the SuperNode's own times ----------------------------------------------------------------


def time_messages(
    on_received: Callable[[str, float], None], on_sent: Callable[[str, float], None]
) -> None:
    """Tell how long a SuperNode receives a message, and sends a reply: its type, and seconds."""
    node: Any = import_module("flwr.supernode.start_client_internal")
    pull, push = node._pull_and_store_message, node._push_messages

    def timed_pull(*, receive: Callable[[], Any], **kwargs: Any) -> int | None:
        kinds: list[str] = []

        def receive_message() -> Any:
            found = receive()
            kinds.extend([] if found is None else [found[0].metadata.message_type])
            return found

        began_s = time.monotonic()
        run_id: int | None = pull(receive=receive_message, **kwargs)
        if run_id is not None:
            on_received(kinds[0], time.monotonic() - began_s)
        return run_id

    def timed_push(*, send: Callable[..., Any], **kwargs: Any) -> None:
        # without the wait for the reply, which comes before
        begun: list[tuple[str, float]] = []

        def send_message(message: Any, *args: Any) -> Any:
            begun.append((message.metadata.message_type, time.monotonic()))
            return send(message, *args)

        push(send=send_message, **kwargs)
        for kind, began_s in begun[:1]:
            on_sent(kind, time.monotonic() - began_s)

    node._pull_and_store_message, node._push_messages = timed_pull, timed_push
