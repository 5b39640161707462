"""Walks of one node through its units, pass after pass: the baselines of CD-GraB.

Every walk has an ``order``, a ``position`` in it, and takes the vectors of the units just visited.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import (
    Signs,
    Vectors,
    checked_order,
    pair_balance,
    reorder,
    unit_signs,
)
from flwr_hetero.cd_grab.order_server import Answer

NO_VECTORS: Vectors = np.zeros((0, 0), np.float32)


NO_SIGNS: Signs = np.zeros(0, np.int8)


class Walk:
    """Always the same order: shuffle-once, since units are numbered at random."""

    watching = False
    """Whether the vectors of the units visited next are wanted."""

    def __init__(self, num_units: int, seed: int = 0) -> None:
        self.order: NDArray[np.int64] = np.arange(num_units)
        self.seed, self.position = seed, 0

    def take(self, count: int) -> NDArray[np.int64]:
        """Visit the next units; a pass ends where the order does."""
        if self.position >= len(self.order):
            self.turn()
            self.position = 0
        units = self.order[self.position : self.position + count]
        self.position += len(units)
        return units

    def see(self, vectors: Vectors) -> None:
        """Take the vectors of the units that were just visited."""

    def turn(self) -> None:
        """Find the order of the next pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue, flat."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; keys of others are passed over."""
        for name, own in self.state_dict().items():
            if name not in state:
                raise ValueError(f"the saved walk lacks {name!r}: start afresh.")
            if _kind(state[name]) != _kind(own):
                raise ValueError(f"the saved walk has {name}={state[name]!r}: start afresh.")
            if name.endswith("order") and len(checked_order(state[name])) != len(self.order):
                raise ValueError(f"the saved walk has {name} of other units: start afresh.")
        if not 0 <= state["position"] <= len(self.order):
            raise ValueError(f"the saved walk is at {state['position']}: start afresh.")
        for name in vars(self):
            setattr(self, name, state[name])


def _kind(value: object) -> str:
    """Tell whether something is an array, and of what, or a number, and of what kind."""
    return value.dtype.kind if isinstance(value, np.ndarray) else type(value).__name__


class Reshuffled(Walk):
    """A fresh random order for each pass: D-RR, if every node has a seed of its own."""

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.num_passes = 0
        self.turn()

    def turn(self) -> None:
        """Draw the order of the next pass."""
        rng = np.random.default_rng([self.seed, self.num_passes])
        self.order, self.num_passes = rng.permutation(len(self.order)), self.num_passes + 1


class PairWalk(Walk):
    """Make differences of pairs from the vectors of units visited one after the other."""

    watching = True

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.half: Vectors = NO_VECTORS

    def differ(self, vectors: Vectors) -> Vectors:
        """Return the differences of the pairs that are now complete, and keep half a pair."""
        if len(self.half):
            vectors = np.concatenate([self.half, vectors])
        paired = len(vectors) // 2 * 2
        self.half = vectors[paired:].copy()
        return np.asarray(vectors[0:paired:2] - vectors[1:paired:2])


class OwnPairs(PairWalk):
    """Balance the node's own pairs: ID-GraB(PairBal), which needs no server."""

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.total, self.signs = NO_VECTORS, NO_SIGNS

    def see(self, vectors: Vectors) -> None:
        """Give signs to the pairs that are complete."""
        diffs = self.differ(vectors)
        if len(diffs):
            start = self.total if self.total.size else np.zeros_like(diffs[0])
            self.total, signs = pair_balance(start, diffs)
            self.signs = np.concatenate([self.signs, signs])

    def turn(self) -> None:
        """Reorder by the signs of the pass; the signed sum starts from zero again."""
        if self.signs.size:
            self.order = reorder(self.order, unit_signs(self.signs, len(self.order)))
        self.half, self.total, self.signs = NO_VECTORS, NO_VECTORS, NO_SIGNS


class OwnMean(Walk):
    """Balance each unit against the mean of the pass before: ID-GraB(Bal), GraB on each node.

    Notes
    -----
    The mean is that of the vectors as they came, in the first pass zero. (Some published code
    takes the mean of vectors from which the old mean was subtracted already.)
    """

    watching = True

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.mean, self.sum, self.total, self.signs = *[NO_VECTORS] * 3, NO_SIGNS

    def see(self, vectors: Vectors) -> None:
        """Give each unit its sign."""
        if not self.total.size:
            self.total = self.sum = np.zeros_like(vectors[0])
        mean = self.mean if self.mean.size else np.zeros_like(vectors[0])
        self.total, signs = pair_balance(self.total, vectors - mean)
        self.sum = self.sum + vectors.sum(axis=0)
        self.signs = np.concatenate([self.signs, signs])

    def turn(self) -> None:
        """Reorder by the signs of the pass; its mean is subtracted in the next one."""
        if self.signs.size:
            self.order = reorder(self.order, self.signs)
            self.mean = self.sum / self.sum.dtype.type(len(self.signs))
        self.sum, self.total, self.signs = NO_VECTORS, NO_VECTORS, NO_SIGNS


class Seen(NamedTuple):
    """Pairs to report."""

    version: int
    first_pair: int
    diffs: Vectors


class Rows:
    """Rows of equal length, added at the end without moving the earlier ones each time."""

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
        """Copy rows to the end."""
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
    """

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.version, self.next_version, self.next_order = 0, 0, self.order
        self.watching, self.done, self.first_pair = True, False, 0
        self.seen = Rows()

    def follow(self, answer: Answer) -> None:
        """Take note of what the server wants, in a new instruction."""
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
