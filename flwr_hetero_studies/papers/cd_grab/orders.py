"""Orders of all workers, pass by pass: the paper's methods, and the package's server and nodes.

``visit`` takes each worker's next units of the pass, ``observe`` learns from their vectors, where
an order ``learns`` at all, and ``start_pass`` finds the orders of the next pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

CD_GRAB, D_RR, BAL, PAIR_BAL = "CD-GraB", "D-RR", "ID-GraB(Bal)", "ID-GraB(PairBal)"
ONCE = "shuffle once"
METHODS = {BAL: "id-grab-mean", PAIR_BAL: "id-grab", D_RR: "d-rr", ONCE: "shuffle-once"}
"""The paper's name of what each worker does alone, and ours."""
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
                # the caller goes on with its buffer
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
        columns, units = np.array(self.signs).T, self.orders.shape[1]
        # Alg. 4, l. 14: each worker reorders by its own signs
        self.orders = np.array(
            [reorder(o, unit_signs(s, units)) for o, s in zip(self.orders, columns, strict=True)]
        )
        # Alg. 4, l. 3: r <- 0
        self.half, self.running_sum, self.signs = None, None, []


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
        self.sum, self.running_sum, self.signs = None, None, ()


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
        for node, own in zip(self.nodes, vectors, strict=True):
            node.observe(own)

    def start_pass(self) -> None:
        for node in self.nodes:
            node.start_pass()


class Served:
    """Samplers of all nodes, the records between, and the server that gives them orders.

    A unit is a batch of ``per_unit`` examples, of which node i has ``sizes[i]``; what is visited
    are the numbers of these examples. A whole pass is reported at once: orders do not depend on
    when pairs are.
    """

    learns = True

    def __init__(self, method: str, sizes: Sequence[int], per_unit: int, seed: int) -> None:
        self.kind, self.sketch_size = METHODS.get(method, "cd-grab"), SKETCHES.get(method, 0)
        self.sizes, self.per_unit, self.seed = sizes, per_unit, seed
        self.server = OrderServer(exact=not self.sketch_size)
        self.passes, self.num_bytes = 0, 0
        self.samplers = [self.new_sampler(i) for i in range(len(sizes))]

    @property
    def terms(self) -> Terms:
        return Terms(self.passes, self.sketch_size, self.seed)

    def new_sampler(self, i: int) -> OrderedSampler:
        seed = 1000 * self.seed + i
        return OrderedSampler(self.sizes[i], self.per_unit, seed=seed, method=self.kind)

    def visit(self, step: int, count: int) -> Units:
        """Take the examples of a step, (num_nodes, count, per_unit); a pass begins with orders."""
        # Alg. 3, l. 2: orders come with the pass
        if not step:
            self.send(range(len(self.sizes)))
        return np.array([[s.next_batch()[0] for _ in range(count)] for s in self.samplers])

    def observe(self, vectors: Vectors) -> None:
        """Let every node see the gradients of the one unit that it visits in a step."""
        for sampler, own in zip(self.samplers, torch.from_numpy(vectors), strict=True):
            sampler.observe(own)

    def start_pass(self) -> None:
        self.end_pass(self.reports(range(len(self.sizes))))

    def visit_all(self, i: int, vectors: Vectors) -> Units:
        order, tensor = [], torch.from_numpy(vectors)
        for _ in range(len(vectors)):
            unit, _ = self.samplers[i].next_batch()
            self.samplers[i].observe(tensor[unit])
            order.append(int(unit[0]))
        return np.array(order)

    def send(self, nodes: Sequence[int]) -> None:
        for i in nodes if self.kind == "cd-grab" else ():
            # Alg. 4, l. 15: signs, or a whole order
            record = write_instruction(self.terms, self.server.answer(f"node-{i:02}"))
            self.num_bytes += num_bytes(record)
            self.samplers[i].follow(record)

    def reports(self, nodes: Sequence[int]) -> dict[str, Report]:
        found = {}
        for i in nodes if self.kind == "cd-grab" else ():
            # Alg. 4, l. 5: what nodes send of their gradients
            record = self.samplers[i].report()
            self.num_bytes += num_bytes(record)
            found[f"node-{i:02}"] = read_report(record, self.terms)
        return found

    def end_pass(self, reports: Mapping[str, Report]) -> None:
        self.server.receive(reports)
        self.passes += 1


Orders = Coordinated | Independent | Served


def num_bytes(record: Mapping[str, Any]) -> int:
    """Count what a record carries: bytes as they are, eight for each number."""
    return sum(len(v) if isinstance(v, bytes) else 8 for v in record.values())


def make_orders(method: str, num_workers: int, num_units: int, seed: int) -> Orders:
    if method == CD_GRAB:
        return Coordinated(num_workers, num_units)
    return Independent(method, num_workers, num_units, seed)


def visits(vectors: Vectors, method: str, seed: int) -> Iterator[Units]:
    """Visit fixed vectors (num_workers, num_units, dim) again and again; yield the orders."""
    num_workers, num_units, _ = vectors.shape
    found = make_orders(method, num_workers, num_units, seed)
    while True:
        orders = found.visit(0, num_units)
        yield orders
        if found.learns:
            found.observe(np.take_along_axis(vectors, orders[:, :, None], axis=1))
        found.start_pass()
