"""Data that a warm node reads once, and not for each message."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from flwr.app import Context

T = TypeVar("T")
_preloaded: list[Callable[[Context], Any]] = []


def preload(load: Callable[[Context], T]) -> Callable[[Context], T]:
    """Keep what a function of the context returns while node and settings are the same.

    A warm node (``flwr-hetero supernode``) calls it once, before the messages, and each message
    finds the result. In Flower's own processes the first use in each process calls it.

    Parameters
    ----------
    load : callable
        ``load(context)``: reads the node's data. It must start no threads that go on.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> calls = []
    >>> data = preload(lambda context: calls.append(context.node_config["partition-id"]))
    >>> context = Context(1, 1, {"partition-id": 7}, RecordDict(), {})
    >>> _ = data(context), data(context)
    >>> calls
    [7]
    """
    results: list[tuple[Any, T]] = []

    @wraps(load)
    def loaded(context: Context) -> T:
        key = (context.node_id, dict(context.node_config), dict(context.run_config))
        if not results or results[0][0] != key:
            # Free the memory of the last result before the new one needs it.
            results.clear()
            results.append((key, load(context)))
        return results[0][1]

    _preloaded.append(loaded)
    return loaded


def preload_all(context: Context) -> None:
    """Call what the imported app wants loaded before its messages."""
    for function in _preloaded:
        function(context)
