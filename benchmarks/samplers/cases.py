"""Samplers at equal compute: time to uniform sampling's final accuracy.

Every method takes the learning rate of the grid with the best final accuracy on held-out training
examples, by one development seed; then it trains with the report seeds on all of them. A step
costs its fixed part and so much per example, as the price runs measured it side by side.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.bench import Data, Options, Run
from benchmarks.tables import Case, Line, of
from flwr_hetero.sampler import (
    BatchSampler,
    MercurySampler,
    OrderedSampler,
    SampledLoss,
    UniformSampler,
)
from flwr_hetero.task import load_partition, load_test, make_model
from flwr_hetero.task.data import Examples

SETTINGS = {"rows": 20000, "epochs": 16, "evaluations": 20}
FAST = {"rows": 300, "epochs": 3, "evaluations": 3}
FAST_CASES = ["race/*"]
DEVELOPMENT = 100
REPEATS, TURN = 40, 8
"""Turns of the price runs, and steps in a turn."""
DECAY = 0.001
"""Weight decay of the orders' task, which makes its least loss finite."""
CNN_SEEDS = 2
HORIZON = 64
"""Steps until the averaged model, which is renewed every 8 steps, begins to average."""

TASKS: dict[str, dict[str, tuple[str, int, tuple[float, ...]]]] = {
    "fashion_mnist": {
        "images": ("mlp", 64, (0.1, 0.3, 0.6)),
        "images, 30 % wrong labels": ("mlp", 64, (0.1, 0.3, 0.6)),
        "images, rare classes": ("mlp", 64, (0.1, 0.3, 0.6)),
        "images, each five times": ("mlp", 64, (0.1, 0.3, 0.6)),
        "images, cnn": ("cnn", 64, (0.1, 0.3)),
    },
    "stdlib": {
        "texts": ("bag", 32, (0.6, 1.2, 2.4)),
        "texts, cnn": ("textcnn", 32, (0.1, 0.3, 0.6)),
    },
    "synthetic": {
        "table": ("mlp", 32, (0.3, 0.6, 1.2)),
        "table, rare": ("mlp", 32, (0.3, 0.6, 1.2)),
    },
    "digits": {
        "digits": ("mlp", 16, (0.1, 0.3, 0.6)),
        "digits, rare classes": ("mlp", 16, (0.1, 0.3, 0.6)),
        "digits, 30 % wrong labels": ("mlp", 16, (0.1, 0.3, 0.6)),
    },
}
"""By data set: model, batch size, learning rates tried."""


METHODS: dict[str, Callable[[int, int, int], BatchSampler]] = {
    "uniform": lambda num, size, seed: UniformSampler(num, size, seed=seed),
    "half batches": lambda num, size, seed: UniformSampler(num, size // 2, seed=seed),
    "double batches": lambda num, size, seed: UniformSampler(num, 2 * size, seed=seed),
    "mercury": lambda num, size, seed: MercurySampler(num, size, seed=seed, scores="loss"),
}
ORDERS = ("d-rr", "id-grab", "id-grab-mean", "shuffle-once")
"""Orders of one node without a server; ``d-rr`` is random reshuffling."""


def plan(options: Options, lines: list[Line]) -> Iterator[Run]:
    """Yield prices first, then the grid, then the race with what the grid found best."""
    for task, (model, size, grid) in TASKS.get(options.data, {}).items():
        shared = {"task": task, "model": model, "batch-size": size} | dict(options.settings)
        price = {"experiment": "price", "name": task, "model": model, "batch-size": size}
        yield Run(price, alone=True)
        found = of(lines, **price)
        if not found:
            continue
        for name in METHODS:
            given = {"fixed": fixed_share(found[0]), "own": own_share(found[0], name)}
            tried = of(lines, experiment="grid", name=name, **shared)
            for rate in grid:
                case = {"experiment": "grid", "name": name, "rate": rate} | shared
                yield Run(case, DEVELOPMENT, given)
            if len(tried) == len(grid):
                best = max(tried, key=lambda line: final(line, "averaged"))["case"]["rate"]
                for seed in options.seeds_or(range(CNN_SEEDS if "cnn" in model else 5)):
                    case = {"experiment": "race", "name": name, "rate": best} | shared
                    yield Run(case, seed, given)
    if options.data == "digits":
        for name in ORDERS:
            for seed in options.seeds_or(range(3)):
                yield Run({"experiment": "order", "name": name, "epochs": 30}, seed)


def final(line: Line, readout: str) -> float:
    """Return the mean of the last evaluations."""
    return float(np.mean(line["curve"][readout][-3:]))


def fixed_share(line: Line) -> float:
    """Return the part of a full step's time that does not fall with its examples."""
    m = line["metrics"]
    return float(np.clip(2.0 * m["half_step_ms"] / m["step_ms"] - 1.0, 0.0, 1.0))


def own_share(line: Line, name: str) -> float:
    """Return the time of drawing and learning, beyond uniform sampling's, in steps."""
    m = line["metrics"]
    return max(0.0, float(m[f"{name}_ms"] - m["uniform_ms"])) / float(m["step_ms"])


# --- data ----------------------------------------------------------------------------------


@lru_cache(2)
def split(dataset: str, rows: int) -> tuple[Examples, Examples]:
    """Load the training and the test examples."""
    if dataset == "synthetic":
        from sklearn.datasets import make_classification

        x, y = make_classification(
            30000, 40, n_informative=12, n_redundant=8, n_classes=5, n_clusters_per_class=4,
            class_sep=1.5, flip_y=0.01, random_state=7,
        )  # fmt: skip
        x = torch.from_numpy(((x - x.mean(0)) / x.std(0)).astype(np.float32))[..., None, None]
        y = torch.from_numpy(y).long()
        return Examples(x[:20000][:rows], y[:20000][:rows]), Examples(x[20000:], y[20000:])
    order = np.random.default_rng(7)
    train, test = load_partition(dataset, 0, 1, partition="iid"), load_test(dataset)
    return Examples(*train.take(order.permutation(len(train))[:rows])), test


def make_data(case: Case, seed: int, data: Data) -> tuple[Examples, Examples]:
    """Make the task's variant; the grid evaluates on a sixth that it does not train on."""
    train, test = split(data.source, case["rows"])
    rng, classes = np.random.default_rng(5000 + seed), int(test.targets.max()) + 1
    if case["experiment"] == "grid":
        cut = len(train) * 5 // 6
        train, test = (
            Examples(train.inputs[part], train.targets[part])
            for part in (slice(cut), slice(cut, None))
        )
    index = np.arange(len(train))
    if case["task"].endswith("each five times"):
        index = np.tile(rng.permutation(index)[: len(index) // 5], 5)
    if "rare" in case["task"]:  # from all of the first class to 1 in 50 of the last
        share = 0.02 ** (train.targets.numpy() / (classes - 1))
        index = np.flatnonzero(rng.random(len(train)) < share)
    inputs, targets = train.take(index)
    if case["task"].endswith("wrong labels"):
        wrong = rng.random(len(targets)) < 0.3
        targets[wrong] = torch.from_numpy(rng.integers(classes, size=wrong.sum()))
    return Examples(inputs, targets), test


# --- runs ----------------------------------------------------------------------------------


def run(case: Case, seed: int, data: Data, **given: Any) -> dict[str, Any]:
    """Make one line."""
    if case["experiment"] == "price":
        return {"metrics": price(case, data)}
    if case["experiment"] == "order":
        return order(case, seed, data)
    return race(case, seed, data, **given)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    indices: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Take a step and return the losses of its forward pass."""
    inputs, targets = examples.take(indices)
    optimizer.zero_grad()
    losses = cross_entropy(model(inputs), targets, reduction="none")
    (losses * torch.from_numpy(weights).to(losses)).mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return losses.detach().double().numpy()


def race(case: Case, seed: int, data: Data, fixed: float = 1.0, own: float = 0.0) -> dict[str, Any]:
    """Train for as long as uniform sampling takes for its epochs, in priced steps."""
    train, test = make_data(case, seed, data)
    shape, classes = tuple(train.inputs.shape[1:]), int(test.targets.max()) + 1
    model, averaged = (make_model(case["model"], shape, classes, seed) for _ in range(2))
    size = case["batch-size"]
    optimizer = torch.optim.SGD(model.parameters(), case["rate"])
    sampler = METHODS[case["name"]](len(train), size, seed)
    total = case["epochs"] * len(train) / size
    curve: dict[str, list[float]] = {"cost": [], "accuracy": [], "averaged": [], "steps": []}
    spent, steps, examples = 0.0, 0, 0
    while spent < total:
        indices, weights = sampler.next_batch()
        sampler.update(indices, step(model, optimizer, train, indices, weights))
        spent += own + fixed + (1.0 - fixed) * len(indices) / size
        steps, examples = steps + 1, examples + len(indices)
        if steps % 8 == 0:
            average(averaged, model, min(1.0, HORIZON / (steps + HORIZON)))
        if spent >= (len(curve["cost"]) + 1) * total / case["evaluations"]:
            found = [accuracy(each, test) for each in (model, averaged)]
            for key, value in zip(curve, [spent / total, *found, float(steps)], strict=True):
                curve[key].append(value)
    summary = getattr(sampler, "summary", dict)()
    metrics = {"final": curve["accuracy"][-1], "averaged": curve["averaged"][-1]}
    metrics |= {"examples_a_step": examples / steps, **summary}
    return {"metrics": metrics, "curve": curve}


def order(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Train a softmax regression on digits by one order; return its excess loss by epoch."""
    train, _ = split(data.source, SETTINGS["rows"])
    model = make_model("softmax", tuple(train.inputs.shape[1:]), 10, seed)
    sampler = OrderedSampler(len(train), 16, seed=seed, method=case["name"])
    sampler.train_model(model)
    criterion = SampledLoss(sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=DECAY)
    curve: list[float] = []
    for _ in range(case["epochs"]):
        for batch in sampler:
            inputs, targets = train.take(np.array(batch))
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
        curve.append(objective(model, train))
    best = least(train)
    return {"metrics": {"excess": float(np.mean(curve[-5:])) - best}, "curve": {"objective": curve}}


@torch.no_grad()
def objective(model: nn.Module, train: Examples) -> float:
    """Return cross-entropy and the penalty on the weights, over all examples."""
    penalty = 0.5 * DECAY * sum(float(p.square().sum()) for p in model.parameters())
    return float(cross_entropy(model(train.inputs), train.targets)) + penalty


def least(train: Examples) -> float:
    """Return the least objective, by L-BFGS."""
    model = make_model("softmax", tuple(train.inputs.shape[1:]), 10, 0).double()
    inputs = train.inputs.double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = cross_entropy(model(inputs), train.targets) + 0.5 * DECAY * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return objective(model, Examples(inputs, train.targets))


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, weight: float) -> None:
    """Move the averaged model towards the model."""
    for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
        old.lerp_(new, weight)


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the share of right answers."""
    parts = zip(examples.inputs.split(2000), examples.targets.split(2000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(examples)


def price(case: Case, data: Data) -> dict[str, float]:
    """Measure step, half a step, forward pass and each sampler, in turns, in CPU time."""
    train, _ = split(data.source, SETTINGS["rows"])
    shape, classes = tuple(train.inputs.shape[1:]), int(train.targets.max()) + 1
    model = make_model(case["model"], shape, classes, 0)
    optimizer, size = torch.optim.SGD(model.parameters(), 0.01), case["batch-size"]
    rng, ones = np.random.default_rng(0), np.ones(size)
    samplers = {name: make(len(train), size, 0) for name, make in METHODS.items()}

    def some(count: int) -> NDArray[np.int64]:
        return rng.integers(len(train), size=count)

    def forward() -> None:
        inputs, targets = train.take(some(size))
        with torch.no_grad():
            cross_entropy(model(inputs), targets, reduction="none")

    def draw(sampler: BatchSampler) -> Callable[[], None]:
        def once() -> None:
            indices, _ = sampler.next_batch()
            sampler.update(indices, 0.01 + 3.0 * (indices % 10 == 0))

        return once

    actions: dict[str, Callable[[], Any]] = {
        "step_ms": lambda: step(model, optimizer, train, some(size), ones),
        "half_step_ms": lambda: step(model, optimizer, train, some(size // 2), ones[: size // 2]),
        "forward_ms": forward,
        **{f"{name}_ms": draw(sampler) for name, sampler in samplers.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            start_s = time.thread_time()
            for _ in range(TURN):
                action()
            times[name].append(1000.0 * (time.thread_time() - start_s) / TURN)
    return {name: float(np.median(each)) for name, each in times.items()}
