"""Train one model on m workers in this process, without Flower, and note a curve."""

from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import check_count, invalid
from flwr_hetero_studies.tasks import Examples

Columns: TypeAlias = dict[str, list[float]]
Look: TypeAlias = Callable[[nn.Module], dict[str, float]]
"""Measures a model; what it calls ``loss`` ends a run that has diverged."""
Observe: TypeAlias = Callable[[int, NDArray[np.int64], Tensor], None]
"""Worker, indices and losses of its batch, after the backward pass: gradients can be read."""
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


def train(
    model: nn.Module,
    shares: Sequence[Examples],
    samplers: Sequence[BatchSampler],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    every: int,
    look: Look,
    observe: Observe = lambda worker, indices, losses: None,
) -> Columns:
    """Take synchronous steps, each on the mean of the workers' gradients; return the curve.

    A worker's gradient is that of the mean of weight times loss over the batch that its sampler
    draws of its share. The model is looked at before the first step and after ``every`` steps; a
    curve that diverges ends early, with an infinite loss.
    """
    points: list[dict[str, float]] = []
    for step in range(steps + 1):
        if step % every == 0:
            points.append({"step": step} | look(model))
            if not isfinite(points[-1]["loss"]):
                break
        if step == steps:
            break
        total = [torch.zeros_like(p) for p in model.parameters()]
        for worker, (share, sampler) in enumerate(zip(shares, samplers, strict=True)):
            indices, weights = sampler.next_batch()
            inputs, targets = share.take(indices)
            model.zero_grad(set_to_none=False)
            losses = share.task.losses(model(inputs), targets)
            if not float(losses.detach().mean()) < DIVERGED:  # nor is nan
                points.append({"step": step + 1, "loss": inf})
                return columns(points)
            (losses * torch.from_numpy(weights).to(losses)).mean().backward()  # type: ignore[no-untyped-call]
            observe(worker, indices, losses.detach())
            for part, p in zip(total, model.parameters(), strict=True):
                if p.grad is not None:
                    part.add_(p.grad, alpha=1 / len(shares))
        for part, p in zip(total, model.parameters(), strict=True):
            p.grad = part
        optimizer.step()
    return columns(points)


def columns(points: Iterable[dict[str, float]]) -> Columns:
    """Turn points into columns; a name that a point lacks is infinite there."""
    rows = list(points)
    return {name: [float(row.get(name, inf)) for row in rows] for name in rows[0]}


def mean(curves: Sequence[Columns], name: str) -> list[float]:
    """Average a column over seeds, as far as all curves go."""
    return [float(np.mean(values)) for values in zip(*(c[name] for c in curves), strict=False)]


def first_below(x: Sequence[float], y: Sequence[float], goal: float) -> float:
    """Return where a curve first is at most the goal, between points by a line; else infinity."""
    for i, value in enumerate(y):
        if value <= goal:
            if not i or y[i - 1] == inf:
                return float(x[i])
            part = (y[i - 1] - goal) / (y[i - 1] - value)
            return float(x[i - 1] + part * (x[i] - x[i - 1]))
    return inf
