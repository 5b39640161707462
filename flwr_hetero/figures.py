"""Figures of a whole fleet, which are not computed again for each reply."""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from statistics import median_low
from typing import Generic, TypeVar

RENEW_SHARE = 50
"""A figure is computed again when one node in so many has changed."""

_Value = TypeVar("_Value")


class Figure(Generic[_Value]):
    """A value that depends on all nodes, such as a median of their speeds.

    The server's work for a reply must not grow with the number of nodes that it knows. The value
    is computed again when two per cent of the nodes have changed, so with fewer than 100 nodes
    after each change.

    >>> largest = Figure[int]()
    >>> speeds = [1, 2, 3]
    >>> largest.of(lambda: max(speeds), changes=3, nodes=3)
    3
    >>> speeds.append(9)
    >>> largest.of(lambda: max(speeds), changes=4, nodes=1000), largest.of(lambda: 5, 23, 1000)
    (3, 5)
    """

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._changes = 0
        self._key: Hashable = None

    def of(
        self, compute: Callable[[], _Value], changes: int, nodes: int, key: Hashable = None
    ) -> _Value:
        """Return the value; ``changes``: the number of changes to any node so far.

        The value is computed again at once if ``key`` has changed.
        """
        is_old = changes - self._changes >= max(1, nodes // RENEW_SHARE) or key != self._key
        if self._value is None or is_old:
            self._value = compute()
            self._changes = changes
            self._key = key
        return self._value


def usual_of(values: Sequence[float], early: bool = False) -> float:
    """Return the median; early, as most of the first few may lie, at most twice the low quartile.

    >>> usual_of([1.0, 2.0, 9.0, 9.0, 9.0]), usual_of([1.0, 2.0, 9.0, 9.0, 9.0], early=True)
    (9.0, 4.0)
    """
    most = 2 * sorted(values)[(len(values) - 1) // 4] if early else inf
    return min(median_low(values), most)
