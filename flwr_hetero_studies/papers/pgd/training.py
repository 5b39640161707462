"""One node: the paper's tasks, a step of each method, its price, and Figure 1."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.pgd.algorithm import top_share
from flwr_hetero.pgd.priorities import all_priorities
from flwr_hetero.sampler import PGDSampler, PriorityFeed
from flwr_hetero_studies.core.plan import Data
from flwr_hetero_studies.tasks import load_partition, make_model

LOSS = nn.CrossEntropyLoss(reduction="none")
EVALUATION_BATCH = 500
TURN = 30
"""Steps of each method in a turn, when their prices are measured."""


@dataclass(frozen=True)
class Task:
    """Data and how to make a model for it."""

    inputs: Tensor
    targets: Tensor
    model: str

    def make(self, seed: int) -> nn.Module:
        """Build the model, the same for each method with one seed."""
        if self.model == "cnn" and min(self.inputs.shape[2:]) >= 28:
            return paper_cnn(seed)
        classes = int(self.targets.max()) + 1
        return make_model(self.model, tuple(self.inputs.shape[1:]), classes, seed)


def paper_cnn(seed: int) -> nn.Module:
    """Build the two-layer CNN of section V-D: 10 and 20 kernels of 5x5, ReLU, pooling.

    The paper pools by 5x5, which leaves nothing of 28x28 images after the second convolution;
    the usual 2x2 is taken here.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(320, 10),
        )  # fmt: skip


def linear_data(num_samples: int, dim: int, noise: float) -> tuple[Tensor, Tensor]:
    """Draw points, label them by a random hyperplane, then add Gaussian noise to each dimension."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(dim, generator=generator)
    points = torch.randn(num_samples, dim, generator=generator)
    targets = (points @ normal > 0).long()
    return points + noise * torch.randn(points.shape, generator=generator), targets


def teacher_data(num_samples: int, dim: int, noise: float) -> tuple[Tensor, Tensor]:
    """Draw points, label them by a random network of one hidden layer, then add noise."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(num_samples, dim, generator=generator)
    hidden = (points @ torch.randn(dim, 50, generator=generator) / math.sqrt(dim)).relu()
    scores = hidden @ torch.randn(50, 10, generator=generator)
    targets = (scores - scores.mean(0)).argmax(1)
    return points + noise * torch.randn(points.shape, generator=generator), targets


@lru_cache(2)
def make_task(name: str, num_samples: int, data: Data) -> Task:
    """Build a task: ``lr-synthetic``, ``mlp-synthetic``, or a model and images."""
    kind, source = name.split("-", 1)
    model = {"lr": "softmax", "mlp": "mlp", "cnn": "cnn"}[kind]
    if source == "synthetic":
        linear = kind == "lr"
        points, targets = (
            linear_data(num_samples, 1000, 0.1) if linear else teacher_data(num_samples, 100, 0.1)
        )
        return Task(points[:, None, None, :], targets, model)
    examples = load_partition(data.first(num_samples, 100), 0, 1, partition="iid")
    return Task(examples.inputs[:num_samples], examples.targets[:num_samples], model)


@dataclass(frozen=True)
class Method:
    """How batches are drawn: ``rule`` of PGDSampler (None: SGD), its gate, layers that count."""

    rule: str | None = None
    layers: str = "all"
    gate: float = 1.5
    full_pass: bool = False
    """The paper's pass over all data before the first step; its time counts."""


METHODS = {
    "SGD": Method(),
    "PGD-A": Method("topk"),
    "PGD-A, full first pass": Method("topk", full_pass=True),
    "PGD-A, last layer": Method("topk", layers="last"),
    "stochastic": Method("stochastic", layers="last"),
    "stochastic, no gate": Method("stochastic", layers="last", gate=0.0),
}
"""``stochastic`` is the package's default."""


def steps_of(
    task: Task,
    model: nn.Module,
    lr: float,
    method: Method,
    top: float,
    renewal: float,
    seed: int,
) -> Iterator[None]:
    """Train; yield once when all is ready and then after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    num_samples = len(task.targets)
    num_top, num_renewed = (max(1, round(ratio * num_samples)) for ratio in (top, renewal))
    batch_size = num_top + num_renewed
    if method.rule is None:
        sampler = UniformSampler(num_samples, batch_size, seed=seed)
        yield
        while True:
            backward(task, model, optimizer, *sampler.next_batch())
            optimizer.step()
            yield
    share = num_renewed / batch_size
    pgd = PGDSampler(
        num_samples, batch_size, seed=seed, rule=method.rule, renewal_share=share, gate=method.gate
    )
    feed = PriorityFeed(pgd, model, layers=method.layers)
    if method.full_pass:
        feed.full_pass(model, LOSS, task.inputs, task.targets, batch_size=EVALUATION_BATCH)
    yield
    while True:
        indices, weights = feed.next_batch()
        losses = backward(task, model, optimizer, indices, weights)
        feed.on_batch(model, indices, losses)
        optimizer.step()
        yield


def backward(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    indices: np.ndarray,
    weights: np.ndarray,
) -> Tensor:
    optimizer.zero_grad()
    losses = LOSS(model(task.inputs[indices]), task.targets[indices])
    (losses * torch.from_numpy(weights).to(losses)).mean().backward()
    return losses


@torch.no_grad()
def measure(task: Task, model: nn.Module) -> tuple[float, float]:
    """Return loss and accuracy on all training data, as the paper does."""
    outputs = torch.cat([model(part) for part in task.inputs.split(EVALUATION_BATCH)])
    right = (outputs.argmax(1) == task.targets).float()
    return float(LOSS(outputs, task.targets).mean()), float(right.mean())


def train(
    task: Task,
    name: str,
    *,
    top: float,
    renewal: float,
    lr: float,
    iterations: int,
    points: int,
    seed: int,
) -> dict[str, list[float]]:
    """Train and return the training loss against iterations and CPU seconds; short if diverged."""
    model = task.make(seed)
    steps = steps_of(task, model, lr, METHODS[name], top, renewal, seed)
    seconds, rows = 0.0, []
    for iteration in range(iterations + 1):
        start = time.process_time()
        try:
            next(steps)
        except ValueError:  # priorities that are not finite: the run has diverged
            break
        seconds += time.process_time() - start
        if iteration % max(1, iterations // points) == 0:
            rows.append((iteration, seconds, *measure(task, model)))
            if not np.isfinite(rows[-1][2]):
                break
    names = ("iteration", "seconds", "loss", "accuracy")
    columns = zip(*rows, strict=True) if rows else [()] * 4
    return {
        name: [float(f"{value:.5g}") for value in column]
        for name, column in zip(names, columns, strict=True)
    }


# --- what a step costs ----------------------------------------------------------------------


def prices(
    task: Task, names: Sequence[str], ratio: float, lr: float, turns: int
) -> dict[str, dict[str, Any]]:
    """Train all methods in turns; a price is CPU time over SGD's in the same turn.

    It is taken after the first epoch: the median in each quarter of the run, for the default's
    gate may open on the way, and the mean of the quarters.
    """
    runs, seconds = {}, {}

    def started(name: str) -> tuple[Iterator[None], float]:
        steps = steps_of(task, task.make(0), lr, METHODS[name], ratio, ratio, 0)
        start = time.process_time()
        next(steps)
        return steps, time.process_time() - start

    for name in names:
        started(name)  # loads kernels and rules
        runs[name], ready = started(name)
        seconds[name] = [ready]
    for _ in range(turns):
        for name, steps in runs.items():
            start = time.process_time()
            for _ in range(TURN):
                next(steps)
            seconds[name].append(time.process_time() - start)
    epoch = min(-(-round(0.5 / ratio) // TURN), turns - 1)  # in turn, but for the full first pass
    base = np.array(seconds["SGD"][1:])
    found = {}
    for name, (ready, *times) in seconds.items():
        ratios = (np.array(times) / base)[epoch:]
        parts = [part for part in np.array_split(ratios, 4) if len(part)]
        quarters = [float(np.median(part)) for part in parts]
        start = ready / float(np.median(base)) * TURN if METHODS[name].full_pass else 0.0
        found[name] = {
            "ms": 1e3 * float(np.median(times)) / TURN,
            "price": float(np.mean(quarters)),
            "quarters": quarters,
            "price_low": float(np.quantile(ratios, 0.1)),
            "price_high": float(np.quantile(ratios, 0.9)),
            "start": start,
        }
    return found


# --- Figure 1 -------------------------------------------------------------------------------

ITERATIONS = (0, 10, 50, 200, 600)
TOPS = (0.005, 0.01, 0.02, 0.05)
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
SMALL_STEP = 1e-3
"""Learning rate of the measured steps: small enough for the first order to hold."""


def shares(task: Task, lr: float, most: int) -> list[dict[str, Any]]:
    """Look at all priorities at some iterations of SGD."""
    model, found = task.make(0), []
    steps = steps_of(task, model, lr, METHODS["SGD"], 0.01, 0.01, 0)
    for iteration in range(most + 1):
        next(steps)
        if iteration in ITERATIONS:
            found.append({"iteration": iteration} | look(task, model))
    return found


def look(task: Task, model: nn.Module) -> dict[str, Any]:
    """Measure which part of a full gradient step's loss decrease a step on the top k achieves."""
    data = (task.inputs, task.targets)
    priorities, total = all_priorities(model, LOSS, *data, batch_size=EVALUATION_BATCH)
    order, whole = np.argsort(-priorities), decrease(task, model, total)
    tops = {}
    for top in TOPS:
        chosen = order[: max(1, round(top * len(order)))]
        some = (task.inputs[chosen], task.targets[chosen])
        part = decrease(task, model, all_priorities(model, LOSS, *some)[1]) / whole
        tops[str(top)] = {"of_priorities": top_share(priorities, top), "of_decrease": part}
    scale = np.abs(priorities).mean()
    return {
        "levels": QUANTILES,
        "quantiles": (np.quantile(priorities, QUANTILES) / scale).tolist(),
        "negative": float((priorities < 0).mean()),
        "tops": tops,
        "loss": total_loss(task, model) / len(order),
    }


def total_loss(task: Task, model: nn.Module) -> float:
    """Sum the losses over the data, in double precision."""
    parts = [each.split(EVALUATION_BATCH) for each in (task.inputs, task.targets)]
    with torch.no_grad():
        return sum(float(LOSS(model(x), y).double().sum()) for x, y in zip(*parts, strict=True))


def decrease(task: Task, model: nn.Module, gradient: dict[str, Tensor]) -> float:
    """Return the loss decrease of a small step along the gradient; the model is put back."""
    before, size = total_loss(task, model), SMALL_STEP / len(task.targets)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= size * gradient[name]
        after = total_loss(task, model)
        for name, p in model.named_parameters():
            p.copy_(own[name])
    return before - after
