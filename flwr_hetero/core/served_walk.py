"""The node's side of the order server: watch a pass, report its pairs, take over new orders."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.core.order_book import Answer
from flwr_hetero.core.orders import reorder, unit_signs
from flwr_hetero.core.pair_balance import Vectors
from flwr_hetero.core.walks import NO_VECTORS, PairWalk


class Seen(NamedTuple):
    """Pairs to report.

    Parameters
    ----------
    version : int
        Version of the order that they are of.
    first_pair : int
        Position of the first.
    diffs : ndarray of float, shape (num_pairs, dim)
        Their differences.
    """

    version: int
    first_pair: int
    diffs: Vectors


class Rows:
    """Rows of equal length, added at the end without moving the earlier ones each time.

    Examples
    --------
    >>> rows = Rows(np.zeros((0, 2)))
    >>> for value in (1.0, 2.0, 3.0):
    ...     rows.add(np.full((1, 2), value))
    >>> rows.values.tolist()
    [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    """

    def __init__(self, rows: Vectors = NO_VECTORS) -> None:
        self._room, self._used = rows, len(rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._used

    @property
    def values(self) -> Vectors:
        """The rows, not copied; nothing writes over them."""
        return self._room[: self._used]

    def add(self, rows: Vectors) -> None:
        """Copy rows to the end.

        Parameters
        ----------
        rows : ndarray of float, shape (num_rows, dim)
            As long as those that are there, and of their type.
        """
        if not len(rows):
            return
        needed = self._used + len(rows)
        if needed > len(self._room):
            room = np.empty((max(needed, 2 * self._used), rows.shape[1]), rows.dtype)
            if self._used:
                room[: self._used] = self.values
            self._room = room
        self._room[self._used : needed] = rows
        self._used = needed


class ServedWalk(PairWalk):
    """Walk in the order that the order server wants (Algorithm 3).

    A pass is watched from its first pair, unless a whole pass of the same order was watched
    since the last instruction: then there is nothing to add until the server has answered. A
    new order is taken over between two passes, whenever the answer comes.

    Parameters
    ----------
    num_units : int
        Units of the node.

    Attributes
    ----------
    version : int
        Version of the order, counted by the server.

    Examples
    --------
    >>> walk = ServedWalk(4)
    >>> _ = walk.take(4)
    >>> walk.see(np.array([[3.0], [1.0], [5.0], [1.0]]))
    >>> walk.report().diffs.tolist()
    [[2.0], [4.0]]
    >>> walk.follow(Answer(1, signs=np.array([1, -1], np.int8)))
    >>> walk.take(4).tolist(), walk.version
    ([0, 3, 2, 1], 1)
    """

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.version, self.next_version, self.next_order = 0, 0, self.order
        self.watching, self.done, self.first_pair = True, False, 0
        self.seen = Rows()

    def follow(self, answer: Answer) -> None:
        """Take note of what the server wants, in a new instruction.

        Parameters
        ----------
        answer : Answer
            Signs of an order that this node does not have are passed over: its next report
            tells the server so, which then sends the whole order.
        """
        self.done = False
        self.first_pair, self.seen = self.first_pair + len(self.seen), Rows()
        if answer.order is not None:
            self.next_version, self.next_order = answer.version, answer.order
            self.turn()
            self.first_pair, self.position = answer.first_pair, 2 * answer.first_pair
        elif answer.signs is not None and answer.version == self.version + 1:
            signs = unit_signs(answer.signs, len(self.order))
            self.next_version, self.next_order = answer.version, reorder(self.order, signs)
        if self._has_next() and self.position:
            self.watching = False

    def see(self, vectors: Vectors) -> None:
        """Keep the differences of the pairs that are complete."""
        if not self.watching:
            return
        self.seen.add(self.differ(vectors))
        if self.first_pair + len(self.seen) == len(self.order) // 2:
            self.watching, self.done = False, True

    def report(self) -> Seen:
        """Tell which pairs were seen since the instruction; to be asked after each."""
        return Seen(self.version, self.first_pair, self.seen.values)

    def turn(self) -> None:
        """Take over the next order, if there is one, and begin to watch it."""
        new = self._has_next()
        self.order, self.version = self.next_order, self.next_version
        self.half, self.watching = NO_VECTORS, new or not self.done
        if self.watching:
            self.first_pair, self.seen = 0, Rows()

    def forget(self) -> None:
        """Drop what was seen of this pass: it cannot be compared with what will be seen."""
        self.half, self.seen, self.watching = NO_VECTORS, Rows(), not self.position

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue, flat."""
        return super().state_dict() | {"seen": self.seen.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; see the parent for errors."""
        super().load_state_dict(state)
        self.seen = Rows(state["seen"])

    def _has_next(self) -> bool:
        return self.next_version != self.version
