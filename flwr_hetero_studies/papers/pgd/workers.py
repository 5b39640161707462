"""Workers that choose their batches as SGD, PGD-A or PGD-S, on one model in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

SGD = "SGD"
PGD_A = "PGD-A, full first pass"
PGD_S = "PGD-S"
AUTHORS = "PGD-A, the authors' step"
"""PGD-A with the step of the authors' code: the mean of S plus the mean of T, so that it is twice
the mean of both."""
METHODS = (SGD, PGD_A, PGD_S, AUTHORS)
"""Both kinds of PGD have the paper's pass over all data before the first step."""
AT_A_TIME = 500


@dataclass(frozen=True)
class Ratios:
    """The paper's k and r, and what it leaves open."""

    top: float
    renewal: float
    lr: float
    steps: int
    workers: int = 4
    """The data are divided at random among them."""


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
        self.model = model
        self.share = share
        self.num_renewed = num_renewed
        self.order = self.rng.permutation(len(share))
        self.iteration = 0
        self.gradient = AggregatedGradient(dict(model.named_parameters()), len(share))
        # the paper's pass over all data before the first step
        priorities, total = all_priorities(
            model, each_loss, share.inputs, share.targets, batch_size=AT_A_TIME
        )
        self.gradient.total = total
        self.gradient.covered = float(len(share))
        self.trend = learn(start_trend(len(share)), np.arange(len(share)), priorities, 0)

    def next_batch(self) -> Batch:
        """Renew the priorities of S (Alg. 1, l. 4-13), and pick T (l. 15)."""
        turn = self.iteration * self.num_renewed
        self.iteration += 1
        # Alg. 1, l. 4: S, in turn
        renewed = choose_batch(
            self.trend, self.order, turn, self.iteration, num_renewed=self.num_renewed, num_top=0
        )
        inputs, targets = self.share.take(renewed)
        # Alg. 1, l. 9: p_i <- gbar . g_i for S alone
        priorities = sample_priorities(
            self.model, each_loss, inputs, targets, self.gradient.direction
        )
        named = dict(self.model.named_parameters())
        mean = each_loss(self.model(inputs), targets).mean()
        gradients = torch.autograd.grad(mean, list(named.values()))
        # Alg. 1, l. 22
        self.gradient.absorb(len(renewed), dict(zip(named, gradients, strict=True)))
        # Alg. 1, l. 10 and 13
        self.trend = learn(self.trend, renewed, priorities.double().numpy(), self.iteration)
        # Alg. 1, l. 15: T, which may contain examples of S
        none = np.empty(0, np.int64)
        top = pick_top(estimate(self.trend, self.iteration), self.batch_size, taken=none)
        return top, np.ones(len(top))

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: the priorities of T are not learnt."""

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> None:
        """Do nothing: the gradients of T are not aggregated."""


def make_sampler(
    method: str, model: nn.Module, share: Examples, settings: Ratios, seed: int
) -> UniformSampler | PriorityFeed | BasicPGD:
    """Make a worker's sampler; that of PGD has made its first pass over all data."""
    check_choice("method", method, METHODS)
    num_top = max(1, round(settings.top * len(share)))
    num_renewed = max(1, round(settings.renewal * len(share)))
    size = num_top + num_renewed
    if method == SGD:
        return UniformSampler(len(share), size, seed=seed)
    if method == PGD_S:
        return BasicPGD(model, share, num_renewed, num_top, seed)
    kind = SumOfMeans if method == AUTHORS else PGDSampler
    # S and T of a batch are as large as k and r say
    sampler = kind(len(share), size, seed=seed, rule="topk", renewal_share=num_renewed / size)
    feed = PriorityFeed(sampler, model, layers="all")
    feed.full_pass(model, each_loss, share.inputs, share.targets, batch_size=AT_A_TIME)
    return feed


def train(task: Problem, method: str, settings: Ratios, seed: int, num_points: int = 40) -> Columns:
    """Train; the column ``work`` counts gradients of examples, those of the first pass included."""
    model = task.make_model(seed)
    shares = alone.split(task.examples, settings.workers, seed)
    samplers = [
        make_sampler(method, model, share, settings, 1000 * seed + number)
        for number, share in enumerate(shares)
    ]

    def observe(worker: int, indices: NDArray[np.int64], losses: Tensor) -> None:
        sampler = samplers[worker]
        if not isinstance(sampler, UniformSampler):
            sampler.on_batch(model, indices, losses)

    def look(model: nn.Module) -> dict[str, float]:
        return {"loss": evaluate(model, task.examples, AT_A_TIME)[0]}

    curve = alone.train(
        model,
        shares,
        samplers,
        torch.optim.SGD(model.parameters(), settings.lr),
        num_steps=settings.steps,
        every=max(1, settings.steps // num_points),
        look=look,
        observe=observe,
    )
    # the first pass computes each gradient once
    first = 0 if method == SGD else sum(map(len, shares))
    # PGD-S also computes gradients of S, on which it takes no step
    a_step = sum(s.batch_size + getattr(s, "num_renewed", 0) for s in samplers)
    return curve | {"work": [first + a_step * step for step in curve["step"]]}


def best_rate(task: Problem, settings: Ratios, rates: Sequence[float], seed: int) -> float:
    """Return the learning rate at which SGD ends lowest."""
    ends = {lr: final(train(task, SGD, replace(settings, lr=lr), seed)) for lr in rates}
    return min(ends, key=ends.__getitem__)


LAST = 3
"""The end of a curve is the mean of so many points."""


def final(curve: Columns) -> float:
    return float(np.mean(curve["loss"][-LAST:]))


def jumps(curve: Columns) -> float:
    """Measure how unsteady the later half of a curve is: its rises, over the first loss."""
    later = np.array(curve["loss"][len(curve["loss"]) // 2 :])
    return float(np.diff(later).clip(min=0).sum() / curve["loss"][0])
