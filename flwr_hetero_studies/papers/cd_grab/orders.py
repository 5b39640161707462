"""Orders of all workers, pass by pass: the paper's methods, and the package's server and nodes.

``visit`` takes each worker's next units of the pass, ``observe`` learns from their vectors, where
an order ``learns`` at all, and ``start_pass`` finds the orders of the next pass.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import Signs, Vectors, pair_balance, reorder, unit_signs
from flwr_hetero.cd_grab.node_order import METHODS as NODE_ORDERS
from flwr_hetero.cd_grab.node_order import NodeOrder
from flwr_hetero.cd_grab.strategy import OrderServer
from flwr_hetero.cd_grab.wire import Report, Terms, read_report, write_instruction
from flwr_hetero.sampler import OrderedSampler

Units = NDArray[np.int64]

CD_GRAB = "CD-GraB"
D_RR = "D-RR"
BAL = "ID-GraB(Bal)"
PAIR_BAL = "ID-GraB(PairBal)"
ONCE = "shuffle once"
METHODS = {BAL: "id-grab-mean", PAIR_BAL: "id-grab", D_RR: "d-rr", ONCE: "shuffle-once"}
"""The paper's names of orders that each worker finds alone, and ours."""
EXACT = "CD-GraB, exact"
SKETCHES = {**{f"CD-GraB, k = {size}": size for size in (16, 64, 256, 1024, 4096)}, EXACT: 0}
"""CD-GraB as the package serves it: numbers in a sketch; 0: whole gradients."""


class Coordinated:
    """CD-GraB: all workers' pairs in one sum, step by step (Alg. 4)."""

    learns = True

    def __init__(self, num_workers: int, num_units: int) -> None:
        self.orders = np.tile(np.arange(num_units), (num_workers, 1))
        self.half: Vectors | None = None
        self.running_sum: Vectors | None = None
        self.signs: list[Signs] = []

    def visit(self, step: int, count: int) -> Units:
        return self.orders[:, step * count : (step + 1) * count]

    def observe(self, vectors: Vectors) -> None:
        """Give signs to the pairs that are complete; vectors: (num_workers, count, dim)."""
        for step in vectors.swapaxes(0, 1):
            if self.half is None:
                # a copy, as the caller reuses its buffer
                self.half = step.copy()
                continue
            # in place: the order server is to hold one model, not two (Figure 8)
            diffs = np.subtract(self.half, step, out=self.half)
            start = np.zeros_like(diffs[0]) if self.running_sum is None else self.running_sum
            # Alg. 4, l. 8-13: all workers' pairs of this step, one after the other
            self.running_sum, signs = pair_balance(start, diffs)
            self.signs.append(signs)
            self.half = None

    def start_pass(self) -> None:
        columns = np.array(self.signs).T
        units = self.orders.shape[1]
        # Alg. 4, l. 14: each worker reorders by its own signs
        self.orders = np.array(
            [reorder(o, unit_signs(s, units)) for o, s in zip(self.orders, columns, strict=True)]
        )
        # Alg. 4, l. 3: r <- 0
        self.half = None
        self.running_sum = None
        self.signs = []


class OwnMean(NodeOrder):
    """Balance each unit against the mean of the pass before: ID-GraB(Bal), GraB on each node.

    The mean is that of the vectors as they came, in the first pass zero. (Some published code
    takes the mean of vectors from which the old mean was subtracted already.)
    """

    learns = True
    mean: Vectors | None = None
    sum: Vectors | None = None
    running_sum: Vectors | None = None
    signs: tuple[Signs, ...] = ()

    def observe(self, vectors: Vectors) -> None:
        zero = np.zeros_like(vectors[0])
        mean = zero if self.mean is None else self.mean
        start = zero if self.running_sum is None else self.running_sum
        # Balance (appendix B.2) of vectors that were centred by the last pass
        self.running_sum, signs = pair_balance(start, vectors - mean)
        self.sum = (zero if self.sum is None else self.sum) + vectors.sum(axis=0)
        self.signs += (signs,)

    def start_pass(self) -> None:
        assert self.sum is not None
        signs = np.concatenate(self.signs)
        self.order = reorder(self.order, signs)
        self.mean = self.sum / self.sum.dtype.type(len(signs))
        self.sum = None
        self.running_sum = None
        self.signs = ()


class Independent:
    """Every worker finds its own order."""

    def __init__(self, method: str, num_workers: int, num_units: int, seed: int) -> None:
        kind = NODE_ORDERS.get(METHODS[method], OwnMean)
        # D-RR reshuffles each worker by itself
        self.nodes = [kind(num_units, 1000 * seed + i) for i in range(num_workers)]
        self.learns = kind.learns

    def visit(self, step: int, count: int) -> Units:
        return np.array([node.order[step * count : (step + 1) * count] for node in self.nodes])

    def observe(self, vectors: Vectors) -> None:
        for node, gradients in zip(self.nodes, vectors, strict=True):
            node.observe(gradients)

    def start_pass(self) -> None:
        for node in self.nodes:
            node.start_pass()


class Served:
    """Samplers of all nodes, the records between, and the server that gives them orders.

    A unit is one example, of which node i has ``sizes[i]``. A whole pass is reported at once:
    orders do not depend on when pairs are reported.
    """

    def __init__(self, method: str, sizes: Sequence[int], seed: int) -> None:
        self.kind = METHODS.get(method, "cd-grab")
        self.sketch_size = SKETCHES.get(method, 0)
        self.sizes = sizes
        self.seed = seed
        self.server = OrderServer(exact=not self.sketch_size)
        self.passes = 0
        self.samplers = [self.new_sampler(i) for i in range(len(sizes))]

    @property
    def terms(self) -> Terms:
        return Terms(self.passes, self.sketch_size, self.seed)

    def new_sampler(self, i: int) -> OrderedSampler:
        return OrderedSampler(self.sizes[i], 1, seed=1000 * self.seed + i, method=self.kind)

    def visit_all(self, i: int, vectors: Vectors) -> Units:
        """Let a node visit its units once; return their order."""
        order = []
        tensor = torch.from_numpy(vectors)
        for _ in range(len(vectors)):
            unit, _ = self.samplers[i].next_batch()
            self.samplers[i].observe(tensor[unit])
            order.append(int(unit[0]))
        return np.array(order)

    def send(self, nodes: Sequence[int]) -> None:
        for i in nodes if self.kind == "cd-grab" else ():
            # Alg. 4, l. 15: signs, or a whole order
            answer = self.server.answer(f"node-{i:02}")
            self.samplers[i].follow(write_instruction(self.terms, answer))

    def reports(self, nodes: Sequence[int]) -> dict[str, Report]:
        """Collect what nodes send of their gradients (Alg. 4, l. 5)."""
        served = nodes if self.kind == "cd-grab" else ()
        return {f"node-{i:02}": read_report(self.samplers[i].report(), self.terms) for i in served}

    def end_pass(self, reports: Mapping[str, Report]) -> None:
        self.server.receive(reports)
        self.passes += 1


Orders = Coordinated | Independent


def make_orders(method: str, num_workers: int, num_units: int, seed: int) -> Orders:
    if method == CD_GRAB:
        return Coordinated(num_workers, num_units)
    return Independent(method, num_workers, num_units, seed)


def visits(vectors: Vectors, method: str, seed: int) -> Iterator[Units]:
    """Visit fixed vectors (num_workers, num_units, dim) again and again; yield the orders."""
    num_workers, num_units, _ = vectors.shape
    finder = make_orders(method, num_workers, num_units, seed)
    while True:
        orders = finder.visit(0, num_units)
        yield orders
        if finder.learns:
            finder.observe(np.take_along_axis(vectors, orders[:, :, None], axis=1))
        finder.start_pass()
