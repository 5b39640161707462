"""Nodes with samplers and an order server, without Flower; gradients of all units at once."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from flwr_hetero.cd_grab.order_server import OrderServer
from flwr_hetero.cd_grab.wire import Report, Terms, read_report, write_instruction
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero_studies.papers.cd_grab.orders import ordered
from flwr_hetero_studies.tasks import Examples, load_partition

SERVED = "cd-grab"
METHODS = {
    "D-RR": ("d-rr", 0),
    "shuffle once": ("shuffle-once", 0),
    "ID-GraB(Bal)": ("id-grab-mean", 0),
    "ID-GraB(PairBal)": ("id-grab", 0),
    "CD-GraB, exact": (SERVED, 0),
    **{f"CD-GraB, k = {size}": (SERVED, size) for size in (16, 64, 256, 1024, 4096)},
}
"""Name to the sampler's method and the numbers in a sketch; 0: whole gradients."""


class Nodes:
    """Samplers of all nodes, and the server that gives them orders.

    Parameters
    ----------
    sizes : sequence of int
        Examples of each node.
    batch_size : int
        Examples of a unit.
    name : str
        One of ``METHODS``.
    seed : int
        Of the samplers and the sketches.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, name: str, seed: int) -> None:
        self.method, self.sketch_size = METHODS[name]
        self.sizes, self.batch_size, self.seed = sizes, batch_size, seed
        self.server = OrderServer(exact=not self.sketch_size)
        self.terms, self.order_bytes = Terms(), 0
        self.samplers = [self.new_sampler(i) for i in range(len(sizes))]

    def new_sampler(self, i: int) -> OrderedSampler:
        """Make a node's sampler as at the beginning."""
        seed = 1000 * self.seed + i
        return ordered(self.sizes[i], self.batch_size, seed, self.method)

    def begin(self, server_round: int, nodes: Sequence[int] | None = None) -> None:
        """Send the orders."""
        self.terms = Terms(server_round, self.sketch_size, self.seed)
        for i in self._served(nodes):
            record = write_instruction(self.terms, self.server.answer(f"node-{i:02}"))
            self.order_bytes += num_bytes(record)
            self.samplers[i].follow(record)

    def visit(self, i: int, vectors: Tensor) -> np.ndarray:
        """Let a node visit all its units of one example each; return their order."""
        order = []
        for _ in range(len(vectors)):
            unit, _ = self.samplers[i].next_batch()
            self.samplers[i].observe(vectors[unit])
            order.append(int(unit[0]))
        return np.array(order)

    def reports(self, nodes: Sequence[int] | None = None) -> dict[str, Report]:
        """Take the reports on the pass."""
        found = {}
        for i in self._served(nodes):
            record = self.samplers[i].report()
            self.order_bytes += num_bytes(record)
            found[f"node-{i:02}"] = read_report(record, self.terms)
        return found

    def _served(self, nodes: Sequence[int] | None) -> Sequence[int]:
        if self.method != SERVED:
            return ()
        return range(len(self.samplers)) if nodes is None else nodes


def num_bytes(record: Mapping[str, Any]) -> int:
    """Count what a record carries: bytes as they are, eight for each number."""
    return sum(len(v) if isinstance(v, bytes) else 8 for v in record.values())


def fits(model: str, data: str) -> bool:
    """Return whether a model is large enough for its images: LeNet is not for digits' 8x8."""
    return model != "lenet" or data != "digits"


@lru_cache(maxsize=4)
def examples_of(dataset: str, num_examples: int, seed: int) -> Examples:
    """Take the first examples of the shuffled training data."""
    whole = load_partition(dataset, 0, 1, seed=seed)
    return Examples(whole.inputs[:num_examples], whole.targets[:num_examples])


class UnitGradients:
    """Gradients of all nodes' units from one pass through a model of linear and conv layers.

    A layer's gradient is made from its inputs and the gradient of its outputs, node by node,
    instead of one backward pass per node.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False)
        self._seen: list[tuple[nn.Module, Tensor, Tensor]] = []
        for layer in model.modules():
            if list(layer.parameters(False)):
                layer.register_forward_hook(self._watch)

    def _watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            self._seen.append((layer, inputs[0].detach(), output.requires_grad_()))

    def __call__(self, params: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Differentiate the mean loss of each node's unit.

        params: (dim,); inputs, targets: (nodes, batch, ...) -> (nodes, dim), as
        ``batch_gradient`` would give them, one after the other.
        """
        nodes, batch = targets.shape
        self._seen.clear()
        outputs = fill(self.model, params)(inputs.flatten(0, 1))
        loss = cross_entropy(outputs, targets.flatten(), reduction="sum") / batch
        backs = torch.autograd.grad(loss, [output for *_, output in self._seen])
        parts: list[Tensor] = []
        for (layer, seen, _), back in zip(self._seen, backs, strict=True):
            parts += self._of(layer, seen, back, nodes)
        return torch.cat([part.reshape(nodes, -1) for part in parts], dim=1)

    @staticmethod
    def _of(layer: nn.Module, seen: Tensor, back: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
        if isinstance(layer, nn.Conv2d):
            seen = unfold(seen, layer.kernel_size, padding=layer.padding, stride=layer.stride)
            seen, back = seen.mT, back.flatten(2).mT
        seen = seen.reshape(nodes, -1, seen.shape[-1])
        back = back.reshape(nodes, -1, back.shape[-1])
        return back.mT @ seen, back.sum(dim=1)


def flat(model: nn.Module) -> Tensor:
    """Copy the parameters into one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fill(model: nn.Module, params: Tensor) -> nn.Module:
    """Copy one vector into the parameters."""
    with torch.no_grad():
        start = 0
        for p in model.parameters():
            p.copy_(params[start : start + p.numel()].view(p.shape))
            start += p.numel()
    return model
