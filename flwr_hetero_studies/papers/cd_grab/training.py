"""Training with every order, by the paper's synchronous steps.

Only Flower is left out, which makes thousands of one-step rounds affordable.
Orders do not depend on when pairs are reported, so a node reports a whole pass at once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.cd_grab.algorithm import relative_herding
from flwr_hetero.cd_grab.gradients import sketch_gradients
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.papers.cd_grab.nodes import (
    Nodes,
    UnitGradients,
    examples_of,
    fill,
    fits,
    flat,
)
from flwr_hetero_studies.tasks import Examples, data_shape, evaluate, load_test, make_model

PROBE = 256
"""Numbers in the sketches from which the herding bound of a pass is taken."""
LAST = 5
"""Epochs at the end in which the herding bound is taken."""
SOFTMAX = {"model": "softmax", "num_examples": 4096, "nodes": 8, "batch_size": 4, "lr": 0.03,
           "l2": 0.01, "epochs": 20}  # fmt: skip
LENET = SOFTMAX | {"model": "lenet", "num_examples": 1024, "lr": 0.05, "l2": 0.0, "epochs": 12}
SMALL, LARGE = {"nodes": 4, "batch_size": 8}, {"nodes": 64, "batch_size": 1}
KEY = ("D-RR", "CD-GraB, k = 1024", "ID-GraB(PairBal)", "CD-GraB, exact")
ALL = (*KEY, "ID-GraB(Bal)", "shuffle once", "CD-GraB, k = 256", "CD-GraB, k = 64")
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "softmax, 8 nodes": (SOFTMAX, ALL),
    "softmax, 64 nodes": (SOFTMAX | LARGE, ALL[:5]),
    "softmax, 4 nodes": (SOFTMAX | SMALL, KEY),
    "lenet, 8 nodes": (LENET, KEY[:3]),
    "lenet, 64 nodes": (LENET | LARGE, KEY[:3]),
    "lenet, 4 nodes": (LENET | SMALL, KEY[:3]),
    "softmax, 8 nodes, smaller step": (SOFTMAX | {"lr": 0.01}, KEY),
}


def plan(options: Options) -> Iterator[Trial]:
    """Yield all runs; ``epochs`` of the settings is the most."""
    common = {"data": options.data}
    most = options.settings["epochs"]

    def short(settings: Case) -> Case:
        return common | settings | {"epochs": min(settings["epochs"], most)}

    for seed in options.seeds_or(range(3)):
        for experiment, (settings, methods) in CASES.items():
            for name in methods if fits(settings["model"], options.data) else ():
                yield Trial({"experiment": experiment, "name": name, **short(settings)}, seed)
        for count in (4096, 1024):
            case = {"experiment": "optimum", "name": f"softmax, {count} examples"}
            yield Trial(case | common | {"num_examples": count, "l2": SOFTMAX["l2"]}, seed)


def run(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    """Train, or find the least value of the objective."""
    available = len(examples_of(dataset, case["num_examples"], seed))
    case = case | {"num_examples": available}
    if case["experiment"] == "optimum":
        return {"metrics": {"value": optimum(case, seed, dataset)}}
    return synchronous(case, seed, dataset)


class Measure:
    """Loss on the training data with the penalty, and accuracy on the first test images."""

    def __init__(self, case: Case, seed: int, dataset: str) -> None:
        self.train_set = examples_of(dataset, case["num_examples"], seed)
        test = load_test(dataset)
        self.test_set = Examples(test.inputs[:2000], test.targets[:2000])
        self.l2, self.curve = case["l2"], {"loss": [], "accuracy": []}

    def __call__(self, model: torch.nn.Module) -> None:
        """Add a point to the curve."""
        squares = sum(float(p.detach().square().sum()) for p in model.parameters())
        loss = evaluate(model, self.train_set, 2048)[0] + self.l2 / 2 * squares
        accuracy = evaluate(model, self.test_set, 2048)[1]
        for key, value in (("loss", loss), ("accuracy", accuracy)):
            self.curve[key].append(float(f"{value:.6g}"))


def units_of(case: Case) -> int:
    return case["num_examples"] // case["nodes"] // case["batch_size"]


def synchronous(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    """Train one step of all nodes at a time."""
    model = make_model(case["model"], *data_shape(dataset), seed=seed)
    gradients_of, params, measure = UnitGradients(model), flat(model), Measure(case, seed, dataset)
    num_nodes, units, epochs = case["nodes"], units_of(case), case["epochs"]
    per_node = units * case["batch_size"]
    rows = np.arange(num_nodes * per_node).reshape(num_nodes, per_node)
    inputs, targets = measure.train_set.inputs[rows], measure.train_set.targets[rows]
    nodes = Nodes([per_node] * num_nodes, case["batch_size"], case["name"], seed)
    node, herding = torch.arange(num_nodes)[:, None], []
    measure(fill(model, params))
    for epoch in range(epochs):
        seen = np.empty((units, num_nodes, PROBE), np.float32)
        nodes.begin(epoch)
        for step in range(units):
            drawn = torch.from_numpy(np.array([s.next_batch()[0] for s in nodes.samplers]))
            gradients = gradients_of(params, inputs[node, drawn], targets[node, drawn])
            for sampler, gradient in zip(nodes.samplers, gradients, strict=True):
                sampler.observe(gradient[None])
            if epoch >= epochs - LAST:
                seen[step] = sketch_gradients(gradients, PROBE, 7)
            params = params - case["lr"] * (gradients.mean(dim=0) + case["l2"] * params)
        nodes.server.receive(nodes.reports())
        if epoch >= epochs - LAST:
            herding.append(float(f"{relative_herding(list(seen.swapaxes(0, 1))):.6g}"))
        measure(fill(model, params))
    exchanged = 8 * len(params) * num_nodes * units * epochs
    figures = {"dim": len(params), "model_bytes": exchanged, "order_bytes": nodes.order_bytes}
    figures |= {"herding": float(np.mean(herding)), "loss": measure.curve["loss"][-1]}
    return {"metrics": figures, "curve": measure.curve}


def optimum(case: Case, seed: int, dataset: str) -> float:
    """Find the least value of the objective for softmax regression."""
    train_set = examples_of(dataset, case["num_examples"], seed)
    model = make_model("softmax", *data_shape(dataset), seed=0).double()
    inputs, params = train_set.inputs.double(), list(model.parameters())
    optimizer = torch.optim.LBFGS(
        params, max_iter=300, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in params)
        value = cross_entropy(model(inputs), train_set.targets) + case["l2"] / 2 * squares
        value.backward()
        return value

    optimizer.step(objective)
    return float(objective().detach())
