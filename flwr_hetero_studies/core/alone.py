"""Train one model on m workers in this process, without Flower, and note a curve."""

from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import check_count, invalid
from flwr_hetero_studies.core.curves import Columns, columns
from flwr_hetero_studies.tasks import Examples

Look: TypeAlias = Callable[[nn.Module], dict[str, float]]
"""Measures a model; what it calls ``loss`` ends a run that has diverged."""
Observe: TypeAlias = Callable[[int, NDArray[np.int64], Tensor], None]
"""Worker, indices and losses of its batch, after the backward pass: gradients can be read."""
Backward: TypeAlias = Callable[
    [nn.Module, Examples, NDArray[np.int64], NDArray[np.float64]], Tensor
]
"""Adds a batch's gradient to the model's, and returns its losses."""
DIVERGED = 1e6
"""A batch's mean loss from which a run counts as diverged."""


def split(examples: Examples, num_workers: int, seed: int) -> list[Examples]:
    """Divide examples at random into equal shares; fewer than a worker each are left out."""
    size = len(examples) // check_count("num_workers", num_workers, 1)
    if not size:
        raise invalid("num_workers", num_workers, f"be at most {len(examples)}, the examples")
    order = np.random.default_rng(seed).permutation(len(examples))[: num_workers * size]
    parts = (examples.take(part) for part in order.reshape(num_workers, size))
    return [Examples(inputs, targets, examples.task) for inputs, targets in parts]


def weighted_backward(
    model: nn.Module, examples: Examples, indices: NDArray[np.int64], weights: NDArray[np.float64]
) -> Tensor:
    """Take the gradient of the mean of weight times loss."""
    inputs, targets = examples.take(indices)
    losses = examples.task.losses(model(inputs), targets)
    (losses * torch.from_numpy(weights).to(losses)).mean().backward()  # type: ignore[no-untyped-call]
    return losses.detach()


def steps(
    model: nn.Module,
    shares: Sequence[Examples],
    samplers: Sequence[BatchSampler],
    optimizer: torch.optim.Optimizer,
    *,
    observe: Observe = lambda worker, indices, losses: None,
    backward: Backward = weighted_backward,
) -> Iterator[float]:
    """Take synchronous steps for ever, each on the mean of the workers' gradients.

    Each yields the mean loss of its batches; before the next one rates, shares and samplers may
    be changed. A batch that has diverged yields infinity, and no step is taken.
    """
    while True:
        # a sum beside the model: workers share its gradients one after the other
        total = [torch.zeros_like(p) for p in model.parameters()]
        means: list[float] = []
        for worker, (share, sampler) in enumerate(zip(shares, samplers, strict=True)):
            indices, weights = sampler.next_batch()
            # buffers are kept, and filled anew for each worker
            model.zero_grad(set_to_none=False)
            losses = backward(model, share, indices, weights)
            means.append(float(losses.mean()))
            # nor is nan
            if not means[-1] < DIVERGED:
                yield inf
                return
            observe(worker, indices, losses)
            for part, p in zip(total, model.parameters(), strict=True):
                if p.grad is not None:
                    part.add_(p.grad, alpha=1 / len(shares))
        for part, p in zip(total, model.parameters(), strict=True):
            p.grad = part
        optimizer.step()
        yield sum(means) / len(means)


def train(
    model: nn.Module,
    shares: Sequence[Examples],
    samplers: Sequence[BatchSampler],
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int,
    every: int,
    look: Look,
    observe: Observe = lambda worker, indices, losses: None,
    backward: Backward = weighted_backward,
) -> Columns:
    """Take so many steps, and look at the model before the first one and after each ``every``."""
    points: list[dict[str, float]] = [{"step": 0} | look(model)]
    # zip ends with the range, and so draws no batch that is not taken
    taken = steps(model, shares, samplers, optimizer, observe=observe, backward=backward)
    for step, loss in zip(range(1, num_steps + 1), taken, strict=False):
        # a curve that diverges ends early, with an infinite loss
        if loss == inf:
            points.append({"step": step, "loss": inf})
        elif step % every == 0:
            points.append({"step": step} | look(model))
        if not isfinite(points[-1]["loss"]):
            break
    return columns(points, missing=inf)
