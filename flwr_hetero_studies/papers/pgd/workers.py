"""Workers that choose their batches as SGD, PGD-A or PGD-S do, on one model in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, UniformSampler
from flwr_hetero.errors import check_choice
from flwr_hetero.pgd.algorithm import choose_batch, estimate, learn, pick_top, start_trend
from flwr_hetero.pgd.priorities import AggregatedGradient, all_priorities, sample_priorities
from flwr_hetero.sampler import PGDSampler, PriorityFeed
from flwr_hetero_studies.core import alone
from flwr_hetero_studies.core.curves import Columns
from flwr_hetero_studies.papers.pgd.tasks import Problem, each_loss
from flwr_hetero_studies.tasks import Examples, evaluate

SGD, PGD_A, PGD_S = "SGD", "PGD-A, full first pass", "PGD-S"
PAPER = (SGD, PGD_A, PGD_S)
"""The paper's; its pass over all data before the first step is in both of PGD."""
SPREAD, LAST_LAYER, DRAWN = "PGD-A", "PGD-A, last layer", "stochastic"
AUTHORS = "PGD-A, the authors' step"
"""The step of the authors' code, the mean of S plus the mean of T: twice the mean of both."""
METHODS = (*PAPER, SPREAD, LAST_LAYER, DRAWN)
"""And the package's: that pass spread over the first epoch, priorities of the last layer, draws by
priority without bias."""
AT_A_TIME = 500


@dataclass(frozen=True)
class Ratios:
    """The paper's k and r, and what it leaves open."""

    top: float
    renewal: float
    lr: float
    steps: int
    workers: int = 4
    """Among whom the data are divided at random; 0: one has them as they are."""


class SumOfMeans(PGDSampler):
    """Weigh S and T so that the mean over a batch is the mean of S plus the mean of T."""

    def next_batch(self) -> Batch:
        renewed = self.num_renewed
        indices, _ = super().next_batch()
        sizes = np.array([renewed, len(indices) - renewed])
        # in the first pass there is no T
        return indices, np.repeat(len(indices) / np.maximum(sizes, 1), sizes)


class BasicPGD(BatchSampler):
    """PGD-S: Algorithm 1 without its aggressive lines 11, 20 and 21: steps are on T alone.

    The aggregate has the gradients of S, as in the authors' code.
    """

    learns = True

    def __init__(
        self, model: nn.Module, share: Examples, num_renewed: int, num_top: int, seed: int
    ) -> None:
        super().__init__(len(share), num_top, seed=seed)
        self.model, self.share, self.num_renewed = model, share, num_renewed
        self.order, self.iteration = self.rng.permutation(len(share)), 0
        self.gradient = AggregatedGradient(dict(model.named_parameters()), len(share))
        # the paper's pass over all data before the first step
        found, total = all_priorities(
            model, each_loss, share.inputs, share.targets, batch_size=AT_A_TIME
        )
        self.gradient.total, self.gradient.covered = total, float(len(share))
        self.trend = learn(start_trend(len(share)), np.arange(len(share)), found, 0)

    def next_batch(self) -> Batch:
        """Renew the priorities of S (Alg. 1, l. 4-13), and pick T (l. 15)."""
        turn, none = self.iteration * self.num_renewed, np.empty(0, np.int64)
        self.iteration += 1
        # Alg. 1, l. 4: S, in turn
        renewed = choose_batch(
            self.trend, self.order, turn, self.iteration, num_renewed=self.num_renewed, num_top=0
        )
        inputs, targets = self.share.take(renewed)
        # Alg. 1, l. 9: p_i <- gbar . g_i for S alone
        found = sample_priorities(self.model, each_loss, inputs, targets, self.gradient.direction)
        named = dict(self.model.named_parameters())
        mean = each_loss(self.model(inputs), targets).mean()
        parts = torch.autograd.grad(mean, list(named.values()))
        # Alg. 1, l. 22
        self.gradient.absorb(len(renewed), dict(zip(named, parts, strict=True)))
        # Alg. 1, l. 10 and 13
        self.trend = learn(self.trend, renewed, found.double().numpy(), self.iteration)
        # Alg. 1, l. 15: T, which may hold examples of S
        top = pick_top(estimate(self.trend, self.iteration), self.batch_size, taken=none)
        return top, np.ones(len(top))

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: the priorities of T are not learnt."""

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> None:
        """Do nothing: the gradients of T are not aggregated."""


def make_sampler(
    method: str, model: nn.Module, share: Examples, settings: Ratios, seed: int
) -> UniformSampler | PriorityFeed | BasicPGD:
    """Make a worker's sampler; the paper's PGD has its first pass over all data behind it."""
    check_choice("method", method, (*METHODS, AUTHORS))
    top, renewed = (max(1, round(x * len(share))) for x in (settings.top, settings.renewal))
    if method == SGD:
        return UniformSampler(len(share), top + renewed, seed=seed)
    if method == PGD_S:
        return BasicPGD(model, share, renewed, top, seed)
    # S and T of a batch are as large as k and r say
    rule, part = "stochastic" if method == DRAWN else "topk", renewed / (top + renewed)
    kind = SumOfMeans if method == AUTHORS else PGDSampler
    sampler = kind(len(share), top + renewed, seed=seed, rule=rule, renewal_share=part)
    whole = method in (PGD_A, AUTHORS)
    feed = PriorityFeed(sampler, model, layers="all" if whole or method == SPREAD else "last")
    if whole:
        feed.full_pass(model, each_loss, share.inputs, share.targets, batch_size=AT_A_TIME)
    return feed


def begin(task: Problem, method: str, settings: Ratios, seed: int) -> dict[str, Any]:
    """Divide the data among the workers; return what :func:`alone.steps` takes."""
    model, shares, seeds = task.make_model(seed), [task.examples], [seed]
    if settings.workers:
        shares = alone.split(task.examples, settings.workers, seed)
        seeds = [1000 * seed + i for i in range(settings.workers)]
    samplers = [
        make_sampler(method, model, share, settings, own)
        for share, own in zip(shares, seeds, strict=True)
    ]

    def observe(worker: int, indices: NDArray[np.int64], losses: Tensor) -> None:
        sampler = samplers[worker]
        if not isinstance(sampler, UniformSampler):
            sampler.on_batch(model, indices, losses)

    optimizer = torch.optim.SGD(model.parameters(), settings.lr)
    found = {"model": model, "shares": shares, "samplers": samplers, "optimizer": optimizer}
    return found | {"observe": observe}


def train(task: Problem, method: str, settings: Ratios, seed: int, num_points: int = 40) -> Columns:
    """Train; the column ``work`` counts gradients of examples, the first pass among them."""
    started = begin(task, method, settings, seed)

    def look(model: nn.Module) -> dict[str, float]:
        return {"loss": evaluate(model, task.examples, AT_A_TIME)[0]}

    every = max(1, settings.steps // num_points)
    curve = alone.train(**started, num_steps=settings.steps, every=every, look=look)
    # the first pass computes each gradient once
    first = sum(map(len, started["shares"])) if method in (PGD_A, PGD_S, AUTHORS) else 0
    # PGD-S computes gradients of S that it does not step on
    a_step = sum(s.batch_size + getattr(s, "num_renewed", 0) for s in started["samplers"])
    return curve | {"work": [first + a_step * step for step in curve["step"]]}


def best_rate(
    task: Problem, method: str, settings: Ratios, rates: Sequence[float], seed: int
) -> float:
    tried = {lr: train(task, method, replace(settings, lr=lr), seed) for lr in rates}
    return min(tried, key=lambda lr: final(tried[lr]))


LAST = 3
"""Points of a curve whose mean is its end."""


def final(curve: Columns) -> float:
    return float(np.mean(curve["loss"][-LAST:]))


def jumps(curve: Columns) -> float:
    """Measure how unsteady the later half of a curve is: its rises, over the first loss."""
    later = np.array(curve["loss"][len(curve["loss"]) // 2 :])
    return float(np.diff(later).clip(min=0).sum() / curve["loss"][0])
