"""One training run on one node: SGD, PGD in the paper's two variants, or ours."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tasks import Task
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.pgd.priority_feed import AggregatedGradient
from flwr_hetero.sampler import PGDSampler, PriorityFeed, sample_priorities

LOSS = nn.CrossEntropyLoss(reduction="none")
EVALUATION_BATCH = 500
Batch = tuple[NDArray[np.int64], NDArray[np.float64]]
Step = Callable[[], None]


@dataclass(frozen=True)
class Method:
    """How batches are drawn and what is learned from them.

    Attributes
    ----------
    rule : str or None
        Of PGDSampler; None is SGD with reshuffling.
    layers : str
        Parameters that the priorities count, see PriorityFeed.
    aggressive : bool
        PGD-A or the basic PGD-S.
    full_pass : bool
        The paper's pass over all data before the first step; its time counts.
    gate : float
        For the rule ``stochastic``.
    stride, idle_stride : int
        For the rule ``stochastic``: one of so many batches is measured while the gate is open
        and while it is closed.
    """

    rule: str | None = None
    layers: str = "all"
    aggressive: bool = True
    full_pass: bool = False
    gate: float = 1.5
    stride: int = 4
    idle_stride: int = 64


METHODS = {
    "SGD": Method(),
    "PGD-A": Method("topk"),
    "PGD-A, full first pass": Method("topk", full_pass=True),
    "PGD-S": Method("topk", aggressive=False),
    "PGD-A, last layer": Method("topk", layers="last"),
    "normalised": Method("topk-normalised"),
    "stochastic": Method("stochastic", layers="last"),
    "stochastic, no gate": Method("stochastic", layers="last", gate=0.0),
}
"""``stochastic`` is the package's default."""


def one_run(
    task: Task,
    method: Method,
    *,
    top: float,
    renewal: float,
    lr: float,
    iterations: int,
    points: int,
    seed: int,
) -> list[dict[str, float]]:
    """Train and return the training loss now and then, against iterations and CPU seconds."""
    model = task.make(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    seconds = -time.process_time()
    steps = make_steps(task, model, optimizer, method, top, renewal, seed)
    next(steps)
    seconds += time.process_time()
    curve = [measure(task, model, 0, seconds)]
    for iteration in range(1, iterations + 1):
        start = time.process_time()
        next(steps)
        seconds += time.process_time() - start
        if iteration % max(1, iterations // points) == 0:
            curve.append(measure(task, model, iteration, seconds))
            if not np.isfinite(curve[-1]["loss"]):
                break
    return curve


def make_steps(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    top: float,
    renewal: float,
    seed: int,
) -> Iterator[None]:
    """Yield once when all is ready and then after each step."""
    sampler = PGDSampler.from_ratios(
        len(task.targets),
        top,
        renewal,
        seed=seed,
        rule=method.rule or "topk",
        aggressive=method.aggressive,
        gate=method.gate,
    )
    if method.rule is None:
        return sgd(task, model, optimizer, sampler.batch_size, seed)
    if not method.aggressive:
        return basic(task, model, optimizer, sampler)
    return aggressive(task, model, optimizer, sampler, method)


def sgd(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, seed: int
) -> Iterator[None]:
    """Mini-batch SGD with reshuffling."""
    sampler = UniformSampler(len(task.targets), batch_size, seed=seed)
    yield
    while True:
        backward(task, model, optimizer, sampler.next_batch())
        optimizer.step()
        yield


def aggressive(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: PGDSampler,
    method: Method,
) -> Iterator[None]:
    """PGD-A and our rules: priorities come from the training step itself."""
    strides = {"stride": method.stride, "idle_stride": method.idle_stride}
    feed = PriorityFeed(sampler, model, layers=method.layers, **strides)
    if method.full_pass:
        feed.full_pass(model, LOSS, task.inputs, task.targets, batch_size=EVALUATION_BATCH)
    yield
    while True:
        batch = feed.next_batch()
        losses = backward(task, model, optimizer, batch)
        feed.on_batch(model, batch[0], losses)
        optimizer.step()
        yield


def basic(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, sampler: PGDSampler
) -> Iterator[None]:
    """PGD-S: the examples in turn are only scored, by a forward-mode pass of their own."""
    gradient = AggregatedGradient(dict(model.named_parameters()), sampler.num_samples)
    yield
    while True:
        indices, weights = sampler.next_batch()
        used = weights > 0
        backward(task, model, optimizer, (indices[used], weights[used]))
        if gradient.is_known:
            renewed = indices if used.all() else indices[~used]
            data = task.inputs[renewed], task.targets[renewed]
            found = sample_priorities(model, LOSS, *data, gradient.direction)
            sampler.update(renewed, found.double().numpy())
        for parameter in model.parameters():  # the mean over the top alone
            assert parameter.grad is not None
            parameter.grad /= weights[used].mean()
        gradient.absorb(int(used.sum()))
        optimizer.step()
        yield


def backward(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> Tensor:
    indices, weights = batch
    optimizer.zero_grad()
    losses = LOSS(model(task.inputs[indices]), task.targets[indices])
    (losses * torch.from_numpy(weights).to(losses)).mean().backward()
    return losses


@torch.no_grad()
def measure(task: Task, model: nn.Module, iteration: int, seconds: float) -> dict[str, float]:
    """Evaluate on all training data, as the paper does."""
    outputs = torch.cat([model(part) for part in task.inputs.split(EVALUATION_BATCH)])
    return {
        "iteration": iteration,
        "seconds": seconds,
        "loss": float(LOSS(outputs, task.targets).mean()),
        "accuracy": float((outputs.argmax(1) == task.targets).float().mean()),
    }
