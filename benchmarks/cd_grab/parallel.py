"""The paper's training: one step of all nodes at a time, orders from the package, no messages.

Samplers, walks, records and order server are those of the package; only Flower is left out, which
makes thousands of one-step rounds affordable. Orders do not depend on when pairs are reported, so
a node reports a whole pass at once. ``training.py`` runs the same through Flower's messages.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from flwr_hetero.cd_grab.algorithm import relative_herding
from flwr_hetero.cd_grab.gradients import sketch_gradients
from flwr_hetero.cd_grab.order_server import OrderServer
from flwr_hetero.cd_grab.wire import Terms, read_report, write_instruction
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.task import Examples, data_shape, evaluate, load_partition, load_test, make_model

PROBE = 256
"""Numbers in the sketches from which the herding bound of a pass is taken."""
TEST_EXAMPLES = 2000
LAST = 5
"""Epochs at the end of which figures are means; the herding bound is taken in these only."""


@dataclass(frozen=True)
class Setup:
    """One training run.

    Parameters
    ----------
    dataset, model : str
        As for the apps.
    num_examples : int
        Training examples in all, dealt evenly.
    nodes, batch_size : int
        Nodes, and examples per unit.
    lr, l2 : float
        Step size, and weight of the squared parameters / 2 in the objective.
    epochs : int
        Passes over the data.
    method : str
        Of the sampler; ``cd-grab`` with ``sketch_size`` 0 is the exact one.
    sketch_size, seed : int
        Numbers per pair, and the seed of deal, model and method.
    """

    dataset: str
    model: str = "softmax"
    num_examples: int = 4096
    nodes: int = 8
    batch_size: int = 4
    lr: float = 0.03
    l2: float = 0.01
    epochs: int = 20
    method: str = "cd-grab"
    sketch_size: int = 1024
    seed: int = 0

    @property
    def units(self) -> int:
        """Units of each node."""
        return self.num_examples // self.nodes // self.batch_size


@lru_cache(maxsize=4)
def examples_of(dataset: str, num_examples: int, seed: int) -> Examples:
    """Take the first examples of the shuffled training data."""
    whole = load_partition(dataset, 0, 1, seed=seed)
    return Examples(whole.inputs[:num_examples], whole.targets[:num_examples])


@lru_cache(maxsize=1)
def test_of(dataset: str) -> Examples:
    """Take the first test examples."""
    whole = load_test(dataset)
    return Examples(whole.inputs[:TEST_EXAMPLES], whole.targets[:TEST_EXAMPLES])


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

        Parameters
        ----------
        params : Tensor, shape (dim,)
            The model.
        inputs, targets : Tensor, shape (nodes, batch, ...)
            A unit of each node.

        Returns
        -------
        Tensor, shape (nodes, dim)
            As ``batch_gradient`` would give them, one after the other.
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


class Nodes:
    """The nodes' data, in one block, their samplers, and the order server."""

    def __init__(self, setup: Setup) -> None:
        whole = examples_of(setup.dataset, setup.num_examples, setup.seed)
        per_node = setup.units * setup.batch_size
        rows = np.arange(setup.nodes * per_node).reshape(setup.nodes, per_node)
        self.inputs, self.targets = whole.inputs[rows], whole.targets[rows]
        self.setup, self.served = setup, setup.method == "cd-grab"
        self.server = OrderServer(exact=not setup.sketch_size)
        self.terms, self.order_bytes = Terms(), 0
        self.samplers = [
            OrderedSampler(
                per_node,
                setup.batch_size,
                seed=1000 * setup.seed + i,
                method=setup.method,
                num_units=setup.units,
            )
            for i in range(setup.nodes)
        ]

    def begin(self, epoch: int) -> None:
        """Hand out the orders."""
        self.terms = Terms(epoch, self.setup.sketch_size, self.setup.seed)
        for i, sampler in enumerate(self.samplers if self.served else ()):
            record = write_instruction(self.terms, self.server.answer(str(i)))
            self.order_bytes += num_bytes(record)
            sampler.follow(record)

    def next_units(self) -> tuple[Tensor, Tensor]:
        """Draw a unit on each node."""
        indices = torch.from_numpy(np.array([s.next_batch()[0] for s in self.samplers]))
        node = torch.arange(len(indices))[:, None]
        return self.inputs[node, indices], self.targets[node, indices]

    def observe(self, gradients: Tensor) -> None:
        """Show each sampler its unit's gradient, as ``OrderedSampler.observe`` does it."""
        if not any(sampler.watching for sampler in self.samplers):
            return
        vectors = sketch_gradients(gradients, self.terms.sketch_size, self.terms.sketch_seed)
        for sampler, vector in zip(self.samplers, vectors, strict=True):
            sampler.walk.see(vector[None])

    def end(self) -> None:
        """Report the pairs of the pass."""
        reports = []
        for i, sampler in enumerate(self.samplers if self.served else ()):
            record = sampler.report()
            self.order_bytes += num_bytes(record)
            reports.append(read_report(record, str(i), self.terms))
        self.server.receive(reports)


def num_bytes(record: dict[str, Any]) -> int:
    """Count what a record carries: bytes as they are, eight for each number."""
    return sum(len(v) if isinstance(v, bytes) else 8 for v in record.values())


def run(setup: Setup) -> dict[str, Any]:
    """Train, and return the setting with loss, accuracy, herding bound and bytes."""
    torch.set_num_threads(1)
    shape, num_classes = data_shape(setup.dataset)
    model = make_model(setup.model, shape, num_classes, seed=setup.seed)
    gradients_of = UnitGradients(model)
    train_set = examples_of(setup.dataset, setup.num_examples, setup.seed)
    nodes, params = Nodes(setup), flat(model)
    curve: dict[str, list[float]] = {"loss": [], "accuracy": [], "herding": []}

    def measure() -> None:
        fill(model, params)
        penalty = setup.l2 / 2 * float(params.square().sum())
        curve["loss"].append(evaluate(model, train_set, 2048)[0] + penalty)
        curve["accuracy"].append(evaluate(model, test_of(setup.dataset), 2048)[1])

    measure()
    for epoch in range(setup.epochs):
        seen = np.empty((setup.units, setup.nodes, PROBE), np.float32)
        nodes.begin(epoch)
        for step in range(setup.units):
            gradients = gradients_of(params, *nodes.next_units())
            nodes.observe(gradients)
            if epoch >= setup.epochs - LAST:
                seen[step] = sketch_gradients(gradients, PROBE, 7)
            params = params - setup.lr * (gradients.mean(dim=0) + setup.l2 * params)
        nodes.end()
        if epoch >= setup.epochs - LAST:
            curve["herding"].append(relative_herding(list(seen.swapaxes(0, 1))))
        measure()
    exchanged = 8 * len(params) * setup.nodes * setup.units * setup.epochs
    return asdict(setup) | {
        "dataset": setup.dataset.rstrip("/").rsplit("/", 1)[-1],
        "dim": len(params),
        "model-bytes": exchanged,
        "order-bytes": nodes.order_bytes,
        **{key: [float(f"{value:.6g}") for value in values] for key, values in curve.items()},
    }


def optimum(setup: Setup) -> float:
    """Find the least value of the objective for a convex model."""
    train_set = examples_of(setup.dataset, setup.num_examples, setup.seed)
    model = make_model(setup.model, *data_shape(setup.dataset), seed=0).double()
    inputs, params = train_set.inputs.double(), list(model.parameters())
    optimizer = torch.optim.LBFGS(
        params, max_iter=300, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in params)
        value = cross_entropy(model(inputs), train_set.targets) + setup.l2 / 2 * squares
        value.backward()
        return value

    optimizer.step(objective)
    return float(objective().detach())
