"""Train on m workers that each visit their units in an order; one unit is one vector to order."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_hetero_studies.core.curves import Columns, columns
from flwr_hetero_studies.papers.cd_grab.orders import Units, make_orders
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask


@dataclass(frozen=True)
class Schedule:
    """The paper's settings of an experiment."""

    workers: int
    batch: int
    """Units of all workers in a step: the paper's B."""
    epochs: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    adam: bool = False
    decay_every: int = 0
    """After so many epochs the learning rate falls to a tenth; 0: never."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = model.parameters()
        if self.adam:
            return torch.optim.AdamW(params, self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(params, self.lr, self.momentum, weight_decay=self.weight_decay)


def train(task: OrderTask, settings: Schedule, method: str, seed: int) -> Columns:
    """Take steps of all workers at a time; a point of the curve per epoch, with Eq. 8's bound."""
    per_worker = settings.batch // settings.workers
    # pairs need an even number of steps; units that fill none are left out, at random
    steps = len(task) // settings.batch // 2 * 2
    kept = np.random.default_rng(seed).permutation(len(task))[: steps * settings.batch]
    units = kept.reshape(settings.workers, steps * per_worker, 1)
    # the examples of each worker's units: (num_workers, num_units, per_unit)
    shares = units * task.per_unit + np.arange(task.per_unit)
    orders = make_orders(method, settings.workers, steps * per_worker, seed)
    model = task.make_model(seed)
    optimizer = settings.optimizer(model)
    gradients_of = Gradients(task, model)
    worker = np.arange(settings.workers)[:, None]
    points = [{"herding": inf} | task.look(model)]
    for epoch in range(settings.epochs):
        if settings.decay_every:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * 0.1 ** (epoch // settings.decay_every)
        sums = []
        for step in range(steps):
            # Alg. 3, l. 3: the units of this step
            visited = orders.visit(step, per_worker)
            rows = shares[worker, visited].reshape(-1, task.per_unit)
            if orders.learns:
                gradients = gradients_of.each(rows)
                # Alg. 3, l. 4-5: the order learns from each unit's gradient
                orders.observe(gradients.numpy().reshape(settings.workers, per_worker, -1))
                mean = gradients.mean(0)
            else:
                # without an order that learns one backward pass is enough
                mean = gradients_of.mean(rows)
            sums.append(settings.batch * mean.numpy())
            # Alg. 4, l. 6-7: the mean gradient, and the step of all workers
            fill_gradients(model, mean)
            optimizer.step()
        # Alg. 3, l. 9
        orders.start_pass()
        points.append({"herding": furthest(np.array(sums))} | task.look(model))
        if not isfinite(points[-1]["loss"]):
            break
    return columns(points)


class Gradients:
    """Gradients of units at the model's present parameters; a row of examples is a unit."""

    def __init__(self, task: OrderTask, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self._vectorised = vmap(grad(self._loss), in_dims=(None, 0, 0), randomness="error")

    def _loss(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(self.model, dict(params), (inputs,))
        return self.task.train.task.losses(outputs, targets).mean()

    def each(self, rows: Units) -> Tensor:
        """Differentiate each unit's loss: (num_units, dim)."""
        if not self.task.vectorised:
            return torch.stack([self.mean(row[None]) for row in rows])
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        # the only attention with vectorised gradients
        with sdpa_kernel(SDPBackend.MATH):
            gradients = self._vectorised(params, *self.task.train.take(rows))
        return torch.cat([gradients[name].flatten(1) for name in params], dim=1)

    def mean(self, rows: Units) -> Tensor:
        """Differentiate the mean of the units' losses: (dim,)."""
        inputs, targets = (part.flatten(0, 1) for part in self.task.train.take(rows))
        params = dict(self.model.named_parameters())
        loss = self._loss(params, inputs, targets)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()))])


def fill_gradients(model: nn.Module, gradient: Tensor) -> None:
    parameters = list(model.parameters())
    parts = torch.split(gradient, [p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)


def furthest(sums: NDArray[np.float32]) -> float:
    """Take the herding bound (Eq. 8) of the sums of steps (num_steps, dim)."""
    centred = sums - sums.mean(axis=0)
    return float(np.abs(np.cumsum(centred, axis=0, out=centred)).max())
