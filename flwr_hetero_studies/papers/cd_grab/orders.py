"""Orders of all workers, pass by pass, by each method of the paper."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import Signs, Vectors, pair_balance, reorder, unit_signs
from flwr_hetero.cd_grab.node_order import METHODS as NODE_ORDERS
from flwr_hetero.cd_grab.node_order import NO_SIGNS, NO_VECTOR, NodeOrder
from flwr_hetero.errors import check_choice
from flwr_hetero.sampler import OrderedSampler

CD_GRAB, D_RR, BAL, PAIR_BAL = "CD-GraB", "D-RR", "ID-GraB (Bal)", "ID-GraB (PairBal)"
ONCE = "shuffle once"
METHODS = {BAL: "id-grab-mean", PAIR_BAL: "id-grab", D_RR: "d-rr", ONCE: "shuffle-once"}
"""The paper's name of what each worker does alone, and ours."""


class Orders(Protocol):
    """One order per worker."""

    learns: bool
    """Whether it needs vectors."""

    @property
    def orders(self) -> NDArray[np.int64]:
        """Those of this pass: (num_workers, num_units)."""

    def observe(self, vectors: Vectors) -> None:
        """Learn from the vectors just visited: (num_workers, num_new, dim)."""

    def start_pass(self) -> None:
        """Find the orders of the next pass."""


class Coordinated:
    """CD-GraB: all workers' pairs in one sum, step by step (Alg. 4)."""

    learns = True

    def __init__(self, num_workers: int, num_units: int) -> None:
        self.orders = np.tile(np.arange(num_units), (num_workers, 1))
        self.half: Vectors | None = None
        self.running_sum: Vectors | None = None
        self.signs: list[Signs] = []

    def observe(self, vectors: Vectors) -> None:
        """Give signs to the pairs that are complete (Alg. 4, l. 8-13)."""
        for step in vectors.swapaxes(0, 1):
            if self.half is None:
                self.half = step.copy()
                continue
            diffs = np.subtract(self.half, step, out=self.half)
            start = np.zeros_like(diffs[0]) if self.running_sum is None else self.running_sum
            self.running_sum, signs = pair_balance(start, diffs)
            self.signs.append(signs)
            self.half = None

    def start_pass(self) -> None:
        """Reorder (Alg. 4, l. 14); the sum starts from zero again (l. 3)."""
        columns = np.array(self.signs).T
        units = self.orders.shape[1]
        self.orders = np.array(
            [reorder(o, unit_signs(s, units)) for o, s in zip(self.orders, columns, strict=True)]
        )
        self.half, self.running_sum, self.signs = None, None, []


class OwnMean(NodeOrder):
    """Balance each unit against the mean of the pass before: ID-GraB(Bal), GraB on each node.

    The mean is that of the vectors as they came, in the first pass zero. (Some published code
    takes the mean of vectors from which the old mean was subtracted already.)
    """

    learns = watching = True

    def __init__(self, num_units: int, seed: int = 0) -> None:
        super().__init__(num_units, seed)
        self.mean = self.sum = self.running_sum = NO_VECTOR
        self.signs = NO_SIGNS

    def observe(self, vectors: Vectors) -> None:
        """Give each unit its sign."""
        if not self.running_sum.size:
            self.running_sum = self.sum = np.zeros_like(vectors[0])
        mean = self.mean if self.mean.size else np.zeros_like(vectors[0])
        self.running_sum, signs = pair_balance(self.running_sum, vectors - mean)
        self.sum = self.sum + vectors.sum(axis=0)
        self.signs = np.concatenate([self.signs, signs])

    def start_pass(self) -> None:
        """Reorder by the signs of the pass; its mean is subtracted in the next one."""
        if self.signs.size:
            self.order = reorder(self.order, self.signs)
            self.mean = self.sum / self.sum.dtype.type(len(self.signs))
        self.sum = self.running_sum = NO_VECTOR
        self.signs = NO_SIGNS


def ordered(num_samples: int, batch_size: int, seed: int, method: str) -> OrderedSampler:
    """Make a node's sampler by our name of a method, ``id-grab-mean`` among them."""
    known = method in NODE_ORDERS
    name = method if known else "shuffle-once"
    sampler = OrderedSampler(num_samples, batch_size, seed=seed, method=name)
    if not known:
        sampler.node_order = OwnMean(len(sampler.units), seed)
    return sampler


class Independent:
    """Every worker finds its own order."""

    def __init__(self, method: str, num_workers: int, num_units: int, seed: int) -> None:
        kind = NODE_ORDERS.get(METHODS[method], OwnMean)
        self.nodes = [kind(num_units, 1000 * seed + i) for i in range(num_workers)]
        self.learns = kind.learns

    @property
    def orders(self) -> NDArray[np.int64]:
        """The order of each worker."""
        return np.array([node.order for node in self.nodes])

    def observe(self, vectors: Vectors) -> None:
        """Let every worker learn from its own vectors."""
        for node, own in zip(self.nodes, vectors, strict=True):
            node.observe(own)

    def start_pass(self) -> None:
        """Let every worker find its next order."""
        for node in self.nodes:
            node.start_pass()


def make_orders(method: str, num_workers: int, num_units: int, seed: int) -> Orders:
    """Make the orders of a method."""
    check_choice("method", method, (CD_GRAB, *METHODS))
    if method == CD_GRAB:
        return Coordinated(num_workers, num_units)
    return Independent(method, num_workers, num_units, seed)


def visits(vectors: Vectors, method: str, seed: int) -> Iterator[NDArray[np.int64]]:
    """Visit fixed vectors (num_workers, num_units, dim) again and again; yield the orders."""
    num_workers, num_units, _ = vectors.shape
    found = make_orders(method, num_workers, num_units, seed)
    while True:
        yield found.orders
        if found.learns:
            found.observe(np.take_along_axis(vectors, found.orders[:, :, None], axis=1))
        found.start_pass()
