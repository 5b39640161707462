"""CD-GraB as the package serves it: sketches, fleets, and training with every order.

Training takes the paper's synchronous steps; only Flower is left out, which makes thousands of
one-step rounds affordable.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flwr_hetero.cd_grab.algorithm import Vectors
from flwr_hetero.cd_grab.gradients import sketch_gradients
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.cd_grab import fixed
from flwr_hetero_studies.papers.cd_grab.herding import relative_herding
from flwr_hetero_studies.papers.cd_grab.orders import D_RR, EXACT, ONCE, PAIR_BAL, Served
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask, fits, given
from flwr_hetero_studies.papers.cd_grab.train import Schedule, train_by

SETTINGS = {"rounds": 40, "epochs": 24}
"""Rounds of the fleets, most epochs of training."""
FAST = {"rounds": 3, "epochs": 1}
FAST_CASES = ["sketch/softmax, CD-GraB, k = 64", "fleet/*lost, CD-GraB, *",
              "softmax, 4 nodes/*", "optimum/*1024*"]  # fmt: skip
PROBE, LAST = 256, 5
"""Numbers in the sketches that herding bounds are taken from, in so many epochs at the end."""
SOFTMAX = {"model": "softmax", "num_examples": 4096, "nodes": 8, "batch_size": 4, "lr": 0.03,
           "l2": 0.01, "epochs": 20}  # fmt: skip
LENET = SOFTMAX | {"model": "lenet", "num_examples": 1024, "lr": 0.05, "l2": 0.0, "epochs": 12}
SMALL, LARGE = {"nodes": 4, "batch_size": 8}, {"nodes": 64, "batch_size": 1}
KEY = (D_RR, "CD-GraB, k = 1024", PAIR_BAL, EXACT)
TRAINING: dict[str, tuple[Case, tuple[str, ...]]] = {
    "softmax, 8 nodes": (SOFTMAX, (*KEY, ONCE, "CD-GraB, k = 256", "CD-GraB, k = 64")),
    "softmax, 64 nodes": (SOFTMAX | LARGE, KEY),
    "softmax, 4 nodes": (SOFTMAX | SMALL, KEY),
    "lenet, 8 nodes": (LENET, KEY[:3]),
    "lenet, 64 nodes": (LENET | LARGE, KEY[:3]),
    "lenet, 4 nodes": (LENET | SMALL, KEY[:3]),
    "softmax, 8 nodes, smaller step": (SOFTMAX | {"lr": 0.01}, KEY),
}


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from fixed.plan(options)
    for seed in options.seeds_or(range(3)):
        for experiment, (settings, methods) in TRAINING.items():
            epochs = min(settings["epochs"], options.settings["epochs"])
            case = {"experiment": experiment, "data": options.data} | settings
            for name in methods if fits(settings["model"], options.data) else ():
                yield Trial(case | {"name": name, "epochs": epochs}, seed)
        for count in (4096, 1024):
            case = {"experiment": "optimum", "name": f"softmax, {count} examples"}
            rest = {"data": options.data, "num_examples": count, "l2": SOFTMAX["l2"]}
            yield Trial(case | rest, seed)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    if case["experiment"] in ("sketch", "fleet"):
        return fixed.run(case, seed, data.source)
    name = case.get("model", "softmax")
    task = given(data.source, name, case["num_examples"], num_tests=2000, seed=seed)
    task = replace(task, penalty=case["l2"], per_unit=case.get("batch_size", 1))
    if case["experiment"] == "optimum":
        return {"metrics": {"value": optimum(task)}}
    return synchronous(task, case, seed)


def synchronous(task: OrderTask, case: Case, seed: int) -> dict[str, Any]:
    """Train one step of all nodes at a time, with the package's samplers and order server."""
    workers, epochs, steps = case["nodes"], case["epochs"], len(task) // case["nodes"]
    shares = np.arange(workers * steps * task.per_unit).reshape(workers, -1)
    # unequal shares would leave nodes alone: all have as many units
    orders = Served(case["name"], [shares.shape[1]] * workers, task.per_unit, seed)
    settings = Schedule(workers, workers, epochs, case["lr"], 0.0, case["l2"])
    seen: list[Vectors] = []
    bounds: list[float] = []

    def watch(epoch: int, gradients: Vectors) -> None:
        if epoch >= epochs - LAST:
            # sketches keep norms, and those of a pass take little memory
            seen.append(sketch_gradients(torch.from_numpy(gradients[:, 0]), PROBE, 7))
            if len(seen) == steps:
                bounds.append(float(f"{relative_herding([*np.array(seen).swapaxes(0, 1)]):.6g}"))
                seen.clear()

    found = train_by(orders, shares, task, settings, steps, seed, watch)
    curve = {key: [float(f"{value:.6g}") for value in found[own]]
             for key, own in (("loss", "loss"), ("accuracy", "metric"))}  # fmt: skip
    dim = sum(p.numel() for p in task.make_model(seed).parameters())
    metrics = {"dim": dim, "model_bytes": 8 * dim * workers * steps * epochs}
    metrics |= {"order_bytes": orders.num_bytes, "herding": float(np.mean(bounds))}
    return {"metrics": metrics | {"loss": curve["loss"][-1]}, "curve": curve}


def optimum(task: OrderTask) -> float:
    model = task.make_model(0).double()
    inputs, params = task.train.inputs.double(), list(model.parameters())
    # the problem is strictly convex for l2 > 0: any exact method finds the same value
    optimizer = torch.optim.LBFGS(
        params, max_iter=300, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        squares = torch.stack([p.square().sum() for p in params]).sum()
        losses = task.train.task.losses(model(inputs), task.train.targets)
        value = losses.mean() + task.penalty / 2 * squares
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return float(objective().detach())
