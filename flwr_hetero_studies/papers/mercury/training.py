"""Distributed training as Mercury's: devices exchange gradients after every batch."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, UniformSampler
from flwr_hetero.mercury.resharding import offer
from flwr_hetero.mercury.strategy import match
from flwr_hetero.sampler import MercurySampler
from flwr_hetero_studies.core.criteria import PAIRS
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import StepCosts, costs
from flwr_hetero_studies.rivals.adacomm import adaptive_steps
from flwr_hetero_studies.tasks import (
    batch_losses,
    data_shape,
    evaluate,
    load_partition,
    load_test,
    make_model,
)
from flwr_hetero_studies.tasks.partitions import partition_rows
from flwr_hetero_studies.tasks.training import pick_device

Rows = NDArray[np.int64]
FIRST_STEPS = 2
"""AdaComm: local steps at first. The paper does not give them. An exchange for two steps bounds the
gain by 2, and the paper finds at most 1.88."""
ADAPT_EVERY = 10
"""AdaComm: exchanges until the local steps are adapted. The paper does not give it."""
RESHARD_TIMES = 20
"""Parts in which samples are moved in a run."""
SCORE_BATCH = 4096
LONGER = 2
"""AdaComm is trained for so many times as many steps, as it has fewer exchanges for them."""


@dataclass(frozen=True)
class Workload:
    """What is trained, on how many devices, and how long."""

    dataset: str
    model: str = "auto"
    batch_size: int = 32
    num_steps: int = 20_000
    evaluations: int = 200
    rows: int | None = None
    """Of the training examples so many are used."""
    workers: int = 4
    alpha: float = inf
    """Of the Dirichlet distribution by which classes are dealt out; infinite: IID."""
    optimizer: str = "adam"
    rate: float = 0.004
    decays: bool = False
    """Whether the rate falls along a cosine; the paper's is constant."""


@dataclass(frozen=True)
class Sampling:
    """How batches are drawn, and what happens between them."""

    sampling: str = "random"
    """``random``: with replacement; ``reshuffle``; ``paper``: by two levels; ``flat``: as the
    package's default, which learns from training batches too."""
    share: float | None = None
    """Part of the local data that is scored per exchange; None: as much as the exchange hides."""
    is_hidden: bool = True
    """Whether scoring goes on during the exchange (BACC), or comes before the next batch."""
    bandwidth_noise: float = 0.0
    """Standard deviation of the seconds of an exchange, relative."""
    is_adaptive: bool = True
    """Whether the group is sized by this exchange, or always by the mean one."""
    resharding: str = ""
    """``importance`` or ``random``: which samples are exchanged."""
    reshard_share: float = 0.0
    local_steps: int = 1
    adapts_steps: bool = False
    """Whether local steps become fewer as the loss falls (AdaComm)."""


RANDOM = Sampling()
MERCURY = Sampling("paper")
FLAT = Sampling("flat")
ADACOMM = Sampling(local_steps=FIRST_STEPS, adapts_steps=True)


class Holder(NamedTuple):
    """A device: which of the training examples it holds, and the sampler over them."""

    rows: Rows
    sampler: Any


class RandomSampler(UniformSampler):
    """Draw with replacement."""

    def next_batch(self) -> Batch:
        return self.rng.integers(self.num_samples, size=self.batch_size), np.ones(self.batch_size)


class TrainedRun(NamedTuple):
    """A training: what it had cost at each evaluation, and the accuracy."""

    steps: list[float]
    exchanges: list[float]
    seconds: list[float]
    accuracy: list[float]
    moved: int = 0
    """Samples that changed devices."""


Runs = list[TrainedRun]
"""One of each seed."""


SAMPLERS: dict[str, Callable[[int, int, int], BatchSampler]] = {
    "random": lambda num, size, seed: RandomSampler(num, size, seed=seed),
    "reshuffle": lambda num, size, seed: UniformSampler(num, size, seed=seed),
    "paper": lambda num, size, seed: MercurySampler(num, size, seed=seed, estimator="paper"),
    "flat": lambda num, size, seed: MercurySampler(num, size, seed=seed, scores="loss"),
}


class Training:
    """Devices with equal say that train one model (Eq. 1)."""

    def __init__(self, task: Workload, method: Sampling, cost: StepCosts, seed: int) -> None:
        self.task = task
        self.method = method
        self.cost = cost
        where = pick_device("auto")
        whole = load_partition(task.dataset, 0, 1)
        # the data are in random order already
        first = slice(task.rows)
        part = replace(whole, inputs=whole.inputs[first], targets=whole.targets[first])
        self.examples = part.to(where)
        self.test = load_test(task.dataset).to(where)
        labels = self.examples.targets.cpu().numpy()
        partition = ("iid", 1.0) if task.alpha == inf else ("dirichlet", task.alpha)
        self.workers = []
        for number, rows in enumerate(partition_rows(labels, task.workers, *partition, seed=seed)):
            make_sampler = SAMPLERS[method.sampling]
            size = min(task.batch_size, len(rows))
            self.workers.append(Holder(rows, make_sampler(len(rows), size, 100 * seed + number)))
        self.model = make_model(task.model, *data_shape(task.dataset), seed).to(where)
        self.models = [self.model]
        if method.local_steps > 1:
            self.models = [copy.deepcopy(self.model) for _ in self.workers]
        make: Any = torch.optim.Adam if task.optimizer == "adam" else torch.optim.SGD
        self.optimizers: list[torch.optim.Optimizer] = [
            make(model.parameters(), lr=task.rate) for model in self.models
        ]
        # two streams, so that noise does not change which samples move
        self.rng = np.random.default_rng([seed, 1])
        self.noise = np.random.default_rng([seed, 2])
        self.local_steps = method.local_steps
        self.exchanges = 0
        self.first_loss = 0.0
        self.learns = method.sampling in ("paper", "flat")

    def run(self) -> TrainedRun:
        """Train, and measure the model on the test examples from time to time."""
        task = self.task
        steps = 0
        seconds = 0.0
        moved = 0
        points: list[tuple[float, ...]] = []
        part = max(1, task.num_steps // RESHARD_TIMES)
        for mark in np.linspace(0, task.num_steps, task.evaluations + 1)[1:].astype(int).tolist():
            while steps < mark:
                self._set_rate(steps / task.num_steps if task.decays else 0.0)
                taken, took_s = self.advance()
                if self.method.resharding and (steps + taken) // part > steps // part:
                    moved += self.reshard()
                steps += taken
                seconds += took_s
            accuracy = evaluate(self.model, self.test, device="auto")[1]
            points.append((steps, self.exchanges, seconds, accuracy))
        spent = (list(column) for column in zip(*points, strict=True))
        return TrainedRun._make([*spent, moved])

    def _set_rate(self, done: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.task.rate * (1 + np.cos(np.pi * done)) / 2

    def advance(self) -> tuple[int, float]:
        """Train until gradients or models were exchanged; return steps and seconds."""
        method = self.method
        taken = self.local_steps
        noise = 1.0
        if method.bandwidth_noise:
            noise = max(0.1, 1 + method.bandwidth_noise * float(self.noise.standard_normal()))
        cost = replace(self.cost, exchange_s=self.cost.exchange_s * noise)
        share = 0.0
        if self.learns:
            hidden = (cost if method.is_adaptive else self.cost).hidden_share
            # section 4.3: the group is as large as the exchange hides
            share = hidden if method.share is None else method.share
        # Figure 15's rival: scores first, then the batch
        if share and not method.is_hidden:
            self.score(share)
        hidden_share = share if method.is_hidden else 0.0
        if method.local_steps > 1:
            # AdaComm, and five batches per exchange
            self._local_steps(taken)
            if hidden_share:
                self.score(hidden_share)
        else:
            # BACC: the model that is scored is that of the step's start
            self._step(self.model, self.optimizers[0], self.workers, hidden_share)
        self.exchanges += 1
        step_s = cost.step_s(share, is_hidden=method.is_hidden)
        return taken, step_s + (taken - 1) * cost.compute_s

    def _step(
        self, model: nn.Module, optimizer: Any, workers: Sequence[Holder], share: float = 0.0
    ) -> float:
        """Take a step by the mean of devices' gradients; score a share before the model moves."""
        batches = [worker.sampler.next_batch() for worker in workers]
        rows = np.concatenate([w.rows[i] for w, (i, _) in zip(workers, batches, strict=True)])
        # Eq. 1: devices have equal say, whatever their batches
        weights = np.concatenate([c / (len(c) * len(batches)) for _, c in batches])
        losses = self.losses(rows, model)
        optimizer.zero_grad()
        loss: Any = (losses * torch.from_numpy(weights).to(losses)).sum()
        loss.backward()
        if share:
            self.score(share)
        optimizer.step()
        values = losses.detach().cpu().numpy().astype(float)
        if self.method.sampling == "flat":
            parts = np.split(values, np.cumsum([len(c) for _, c in batches])[:-1])
            for worker, (index, _), scores in zip(workers, batches, parts, strict=True):
                worker.sampler.update(index, scores)
        return float(values.mean())

    def _local_steps(self, count: int) -> None:
        """Let each device train by itself, then average the models; AdaComm adapts the steps."""
        devices = list(zip(self.models, self.optimizers, self.workers, strict=True))
        loss = float(np.mean([self._step(m, o, [w]) for m, o, w in devices for _ in range(count)]))
        with torch.no_grad():
            local = [list(model.parameters()) for model in self.models]
            for target, *params in zip(self.model.parameters(), *local, strict=True):
                target.copy_(torch.stack(params).mean(0))
                for param in params:
                    param.copy_(target)
        self.first_loss = self.first_loss or loss
        if self.method.adapts_steps and (self.exchanges + 1) % ADAPT_EVERY == 0:
            self.local_steps = adaptive_steps(loss, self.first_loss, count, FIRST_STEPS)

    def losses(self, rows: Rows, model: nn.Module | None = None) -> torch.Tensor:
        return batch_losses(model or self.model, self.examples, rows)

    def all_losses(self, rows: Rows) -> NDArray[np.float64]:
        with torch.no_grad():
            parts = np.array_split(rows, -(-len(rows) // SCORE_BATCH))
            losses = torch.cat([self.losses(part) for part in parts])
        return np.asarray(losses.cpu().numpy().astype(float))

    def score(self, share: float) -> None:
        """Score a group of each device's data by the model as it is (section 4.1, step 1)."""
        groups = []
        for worker in self.workers:
            worker.sampler.resize_groups(max(1, round(share * len(worker.rows))))
            groups.append(worker.sampler.refresh_indices())
        rows = [w.rows[group] for w, group in zip(self.workers, groups, strict=True)]
        losses = self.all_losses(np.concatenate(rows))
        parts = np.split(losses, np.cumsum([*map(len, rows)])[:-1])
        for worker, group, scores in zip(self.workers, groups, parts, strict=True):
            worker.sampler.update(group, scores)

    def reshard(self) -> int:
        """Exchange samples between devices (section 4.2); return how many moved."""
        offers = {}
        for number, worker in enumerate(self.workers):
            by_importance = self.method.resharding == "importance"
            # section 4.2: from every group, the important ones or any
            values = worker.sampler.importance if by_importance else np.ones(len(worker.rows))
            count = round(self.method.reshard_share * len(worker.rows) / RESHARD_TIMES)
            groups = worker.sampler.groups
            offers[str(number)] = offer(values, groups, count, self.rng).tolist()
        swaps = match(offers, self.rng)
        for (one, i), (other, j) in swaps:
            a = self.workers[int(one)]
            b = self.workers[int(other)]
            # scores stay behind: the new device has not seen the sample
            row = a.rows[i]
            a.rows[i] = b.rows[j]
            b.rows[j] = row
            for worker, slot in ((a, i), (b, j)):
                worker.sampler.forget(np.array([slot]))
        return 2 * len(swaps)


@dataclass(frozen=True)
class SeededTask:
    """A task, and the seeds of its trainings."""

    task: Workload
    seeds: tuple[int, ...]

    def train(self, method: Sampling, cost: StepCosts | None = None) -> "Runs":
        task = self.task
        if method.adapts_steps:
            steps = LONGER * task.num_steps
            task = replace(task, num_steps=steps, evaluations=LONGER * task.evaluations)
        cost = cost or costs(100, task.workers)
        return [Training(task, method, cost, seed).run() for seed in self.seeds]

    def changed(self, **changes: Any) -> "SeededTask":
        return replace(self, task=replace(self.task, **changes))


FAST: dict[str, Workload] = {
    "images": Workload("digits", "mlp", 8, 300, 100),
    "numbers": Workload("breast-cancer", "softmax", 8, 60, 60),
    "texts": Workload("stdlib", "bag", 16, 200, 50, rows=2000),
}


def cell(options: Options, kind: str) -> SeededTask:
    task = FAST[kind]
    if not options.fast:
        shape, _ = data_shape(options.dataset(kind))
        is_image = len(shape) == 3 and min(shape[1:]) >= 8
        task = Workload(options.dataset(kind), *(("resnet18", 32) if is_image else ("auto", 64)))
    return SeededTask(task, tuple(options.seeds_or(range(PAIRS))))
