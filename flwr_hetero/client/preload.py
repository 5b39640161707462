"""Data that a warm node reads once, and not for each message."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flwr.app import Context

T = TypeVar("T")


class Preloaded(Generic[T]):
    """A function of the node's context that keeps what it returned last."""

    def __init__(self, load: Callable[[Context], T]) -> None:
        self.load, self.__doc__ = load, load.__doc__
        self._last: tuple[Any, T] | None = None

    def __call__(self, context: Context) -> T:
        """Return what the function returns for this node and these settings."""
        key = context.node_id, dict(context.node_config), dict(context.run_config)
        if self._last is None or self._last[0] != key:
            # the memory is free before it is needed again
            self._last = None
            self._last = key, self.load(context)
        return self._last[1]


_preloaded: list[Preloaded[Any]] = []


def preload(load: Callable[[Context], T]) -> Preloaded[T]:
    """Keep what a function of the context returns while node and settings are the same.

    On a warm node (``flwr-hetero supernode``) it is called once, before the messages, and each
    message finds the result. In Flower's own processes it is called by the first use in each.

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
    _preloaded.append(Preloaded(load))
    return _preloaded[-1]


def preload_all(context: Context) -> None:
    """Call what the imported app wants loaded before its messages."""
    for function in _preloaded:
        function(context)
