"""Train one model on several workers in this process, without Flower, and return a curve."""

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

Rows: TypeAlias = NDArray[np.int64]
Look: TypeAlias = Callable[[nn.Module], dict[str, float]]
"""Measures a model; a run whose ``loss`` is not finite ends."""
Observe: TypeAlias = Callable[[int, Rows, Tensor], None]
"""Takes a worker, and the indices and losses of its batch, when gradients can be read."""
DIVERGED = 1e6
"""A batch's mean loss from which a run counts as diverged."""


def split(examples: Examples, num_workers: int, seed: int) -> list[Examples]:
    """Divide examples at random into equal shares, and leave the rest out."""
    size = len(examples) // check_count("num_workers", num_workers, 1)
    if not size:
        raise invalid("num_workers", num_workers, f"be at most {len(examples)}, the examples")
    order = np.random.default_rng(seed).permutation(len(examples))[: num_workers * size]
    parts = (examples.take(part) for part in order.reshape(num_workers, size))
    return [Examples(inputs, targets, examples.task) for inputs, targets in parts]


def steps(
    model: nn.Module,
    shares: Sequence[Examples],
    samplers: Sequence[BatchSampler],
    optimizer: torch.optim.Optimizer,
    *,
    observe: Observe = lambda worker, indices, losses: None,
) -> Iterator[float]:
    """Take synchronous steps forever, each on the mean of the workers' gradients.

    Each step yields the mean loss of its batches. Before the next one, rates, shares and samplers
    may be changed. When a batch has diverged, the iterator yields infinity and ends.
    """
    while True:
        # Workers use the gradients of one model in turn, so sum them elsewhere.
        total = [torch.zeros_like(p) for p in model.parameters()]
        means: list[float] = []
        for worker, (share, sampler) in enumerate(zip(shares, samplers, strict=True)):
            indices, weights = sampler.next_batch()
            # Keep the buffers of the gradients.
            model.zero_grad(set_to_none=False)
            inputs, targets = share.take(indices)
            losses = share.task.losses(model(inputs), targets)
            (losses * torch.from_numpy(weights).to(losses)).mean().backward()  # type: ignore[no-untyped-call]
            means.append(float(losses.detach().mean()))
            # This also holds for NaN.
            if not means[-1] < DIVERGED:
                yield inf
                return
            observe(worker, indices, losses.detach())
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
    observe: Observe,
) -> Columns:
    """Take so many steps; measure before the first and after each ``every``-th one."""
    points: list[dict[str, float]] = [{"step": 0} | look(model)]
    # Zip ends with the range, so that no more batches are drawn than needed.
    taken = steps(model, shares, samplers, optimizer, observe=observe)
    for step, loss in zip(range(1, num_steps + 1), taken, strict=False):
        # A curve that diverges ends with an infinite loss.
        if loss == inf:
            points.append({"step": step, "loss": inf})
        elif step % every == 0:
            points.append({"step": step} | look(model))
        if not isfinite(points[-1]["loss"]):
            break
    return columns(points, missing=inf)
