"""The order of one node, pass after pass: served by the order server (Alg. 3), or a baseline."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import Signs, Vectors, pair_balance, reorder, unit_signs
from flwr_hetero.cd_grab.wire import Answer, Report
from flwr_hetero.state_dict import StateDict, check_state

NO_VECTOR: Vectors = np.zeros(0, np.float32)
NO_VECTORS: Vectors = np.zeros((0, 0), np.float32)
NO_SIGNS: Signs = np.zeros(0, np.int8)


class NodeOrder:
    """Always the same order: shuffle-once, since units are numbered at random."""

    learns = False
    """Whether vectors are needed at all."""
    watching = False
    """Whether the vectors of the units visited next are needed."""
    schema: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(["position", "num_seen", "seed"], int),
        "order": ((-1,), "i"),
        "half": ((-1, -1), "f"),
    }

    def __init__(self, num_units: int, seed: int = 0) -> None:
        self.order: NDArray[np.int64] = np.arange(num_units)
        self.seed = seed
        self.position = 0
        self.num_seen = 0
        # The vector of the last unit observed, while it has no partner.
        self.half = NO_VECTORS

    def next_units(self, count: int) -> NDArray[np.int64]:
        """Visit the next units (Alg. 3, l. 3), up to the end of the pass."""
        if self.position >= len(self.order):
            self.start_pass()
            self.position = 0
        units = self.order[self.position : self.position + count]
        self.position += len(units)
        return units

    def observe(self, vectors: Vectors) -> None:
        """Learn from the vectors of the next units of the pass."""

    def differences(self, vectors: Vectors) -> Vectors:
        """Return the differences of the pairs that are now complete, and keep half a pair."""
        self.num_seen += len(vectors)
        if len(self.half):
            vectors = np.concatenate([self.half, vectors])
        paired = len(vectors) // 2 * 2
        # Copy the vector, because the caller may overwrite its buffer. The published code does not.
        self.half = vectors[paired:].copy()
        return vectors[0:paired:2] - vectors[1:paired:2]

    def start_pass(self) -> None:
        """Find the order of the next pass."""

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue, flat."""
        return {name: getattr(self, name) for name in self.schema}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; other keys are ignored."""
        check_state(state, self.schema, type(self).__name__)
        for name in self.schema:
            setattr(self, name, state[name])


class Reshuffled(NodeOrder):
    """A new random order for each pass: D-RR, if every node has a seed of its own."""

    schema = NodeOrder.schema | {"num_passes": int}

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.num_passes = 0
        self.start_pass()

    def start_pass(self) -> None:
        """Draw the order of the next pass."""
        rng = np.random.default_rng([self.seed, self.num_passes])
        self.order = rng.permutation(len(self.order))
        self.num_passes += 1


class OwnPairs(NodeOrder):
    """Balance the node's own pairs: ID-GraB(PairBal), which needs no server."""

    learns = True
    watching = True
    schema = NodeOrder.schema | {"running_sum": ((-1,), "f"), "signs": ((-1,), "i")}

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.running_sum = NO_VECTOR
        self.signs = NO_SIGNS

    def observe(self, vectors: Vectors) -> None:
        """Give signs to the pairs that are complete."""
        diffs = self.differences(vectors)
        if len(diffs):
            start = self.running_sum if self.running_sum.size else np.zeros_like(diffs[0])
            self.running_sum, signs = pair_balance(start, diffs)
            self.signs = np.concatenate([self.signs, signs])

    def start_pass(self) -> None:
        """Reorder by the signs of the pass; the signed sum starts from zero again."""
        if self.signs.size:
            # Pairs that were not trained get +1, as at a tie.
            pairs = np.ones(len(self.order) // 2, np.int8)
            pairs[: len(self.signs)] = self.signs
            self.order = reorder(self.order, unit_signs(pairs, len(self.order)))
        self.num_seen = 0
        self.half = NO_VECTORS
        self.running_sum = NO_VECTOR
        self.signs = NO_SIGNS


class ServedOrder(NodeOrder):
    """Visit units in the order that the order server wants (Alg. 3).

    A pass is watched from its first pair, unless a whole pass of the same order was watched
    since the last instruction: then there is nothing to add until the server has answered.
    """

    learns = True
    schema = NodeOrder.schema | {
        **dict.fromkeys(["version", "next_version", "first_pair"], int),
        "watching": bool,
        "next_order": ((-1,), "i"),
        "diffs": ((-1, -1), "f"),
    }

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.version = 0
        self.next_version = 0
        self.next_order = self.order
        self.watching = True
        self.first_pair = 0
        self.diffs = NO_VECTORS

    @property
    def diffs(self) -> Vectors:
        """Differences since the instruction or the start of the pass."""
        return np.concatenate(self._chunks) if self._chunks else NO_VECTORS

    @diffs.setter
    def diffs(self, diffs: Vectors) -> None:
        self._chunks = [diffs] if len(diffs) else []

    @property
    def is_complete(self) -> bool:
        """Whether all pairs of the pass were observed."""
        return self.num_seen // 2 == len(self.order) // 2

    def follow(self, answer: Answer) -> None:
        """Take the order of a new instruction for the next pass (Alg. 3, l. 2)."""
        self.first_pair = self.num_seen // 2
        self.diffs = NO_VECTORS
        if answer.order is None or answer.version == self.version:
            return
        self.next_version = answer.version
        self.next_order = answer.order
        # The server has no use for more pairs of the old order.
        self.watching = False
        # Adopt the order at once if no pass has begun, as on a node that has lost its state.
        if not self.position:
            self.start_pass()

    def observe(self, vectors: Vectors) -> None:
        """Keep the differences of the pairs that are complete (Alg. 3, l. 5)."""
        if self.watching:
            diffs = self.differences(vectors)
            if len(diffs):
                self._chunks.append(diffs)
            self.watching = not self.is_complete

    def report(self) -> Report:
        """Return the pairs observed since the instruction."""
        return Report(self.version, len(self.order), self.first_pair, self.diffs)

    def start_pass(self) -> None:
        """Adopt the next order, if there is one, and begin to watch it (Alg. 3, l. 9)."""
        awaits_answer = bool(self._chunks) and self.is_complete
        if self.next_version == self.version and awaits_answer:
            return
        self.order = self.next_order
        self.version = self.next_version
        self.watching = True
        self.first_pair = 0
        self.num_seen = 0
        self.half = NO_VECTORS
        self.diffs = NO_VECTORS


METHODS: dict[str, type[NodeOrder]] = {
    "cd-grab": ServedOrder,
    "id-grab": OwnPairs,
    "d-rr": Reshuffled,
    "shuffle-once": NodeOrder,
}
