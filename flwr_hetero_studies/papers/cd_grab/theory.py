"""Theorems 1 and 2, measured: sums of the random walk, and how gradients fall."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_hetero.cd_grab.algorithm import pair_balance, walk_balance
from flwr_hetero_studies.core.criteria import PAIRS, Values, at_scale, fact, higher, within
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.cd_grab.orders import CD_GRAB, D_RR
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask, table
from flwr_hetero_studies.papers.cd_grab.train import Schedule, train
from flwr_hetero_studies.papers.cd_grab.vectors import slope

LENGTHS = (64, 512, 4096)
DIM = 16
FAILURE = 0.1


def walk_threshold(num_pairs: int, failure: float) -> float:
    r"""Return a c that the walk passes with at most half of the probability ``failure``.

    .. math:: c = \frac{1}{2} + \log \frac{4 n}{\delta}

    >>> round(walk_threshold(1000, 0.1), 2)
    11.1
    """
    return 0.5 + float(np.log(4 * num_pairs / failure))


def walk_bound(num_pairs: int, dim: int, failure: float) -> float:
    r"""Bound the largest number of a walk's sum, for all but a part ``failure`` of walks (Thm. 1).

    .. math:: \tilde A = \sqrt{2 \log(4 d / \delta) \log(4 n / \delta)}

    The text of the paper at hand has lost the formula: this one is derived, and not checked
    against the published one. With c of :func:`walk_threshold` a sum is sub-Gaussian with variance
    at most :math:`c^2 / (2 c - 1) \le \log(4 n / \delta)`. Half of the failures pass c, half the
    bound.

    >>> round(walk_bound(1000, 16, 0.1), 2)
    11.7
    """
    return float(np.sqrt(2 * np.log(4 * dim / failure) * np.log(4 * num_pairs / failure)))


def theorem_1(options: Options) -> Finding:
    runs = options.pick(20, 100)
    found = {}
    for seed in options.seeds_or(range(PAIRS)):
        rng = np.random.default_rng(seed)
        for n in LENGTHS:
            for _ in range(runs):
                diffs = rng.normal(size=(n, DIM))
                diffs /= np.linalg.norm(diffs, axis=1, keepdims=True)
                walk = walk_balance(np.zeros(DIM), diffs, walk_threshold(n, FAILURE), rng)[1]
                greedy = pair_balance(np.zeros(DIM), diffs)[1]
                # over all prefixes
                each = [np.abs(np.cumsum(s[:, None] * diffs, axis=0)).max() for s in (walk, greedy)]
                found.setdefault((seed, n), []).append(each)
    every = {key: np.array(each) for key, each in found.items()}
    seeds = sorted({seed for seed, _ in every})
    of = {n: np.array([every[seed, n] for seed in seeds]) for n in LENGTHS}
    bounds = {n: walk_bound(n, DIM, FAILURE) for n in LENGTHS}
    shares = {n: float((of[n][:, :, 0] > bounds[n]).mean()) for n in LENGTHS}
    means = {n: each.mean(axis=1) for n, each in of.items()}
    powers = [slope(LENGTHS, [means[n][i, 0] for n in LENGTHS]) for i in range(len(seeds))]
    rows = [
        (n, f"{bounds[n]:.1f}", f"{means[n][:, 0].mean():.2f}", f"{of[n][:, :, 0].max():.2f}",
         f"{means[n][:, 1].mean():.2f}")
        for n in LENGTHS
    ]  # fmt: skip
    claims = [
        fact(f"of walks at most a part of {FAILURE} passes the bound at any vector", "with "
             "probability 1 - delta", f"at most {max(shares.values()):.3f}",
             max(shares.values()) <= FAILURE),
        within("their sums grow like a logarithm: with a power of at most 0.2 of their number",
               "logarithms", powers, high=0.2, form=".2f"),
        higher("greedy signs, which no theorem is about, keep sums shorter (of 4096)",
               "in practice", means[4096][:, 0] - means[4096][:, 1]),
    ]  # fmt: skip
    head = ("vectors", "bound", "walk: mean", "walk: largest", "greedy: mean")
    return Finding(head, rows, claims)


@dataclass(frozen=True)
class Stationary(OrderTask):
    """A task of which the squared gradient is looked at: what Theorem 2 bounds."""

    def look(self, model: nn.Module) -> dict[str, float]:
        inputs, targets = self.train.take(np.arange(len(self.train)))
        parts = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
        return {"loss": float(sum(part.square().sum() for part in parts))}


UNITS = 32
EPOCHS = (4, 8, 16)
FLEETS = (1, 4, 8)
RATES = (0.1, 0.3)


def theorem_2(options: Options) -> Finding:
    """Take the mean squared gradient over T epochs at the best of some rates, as the theorem."""
    seeds = options.seeds_or(range(PAIRS))

    def least(method: str, workers: int, epochs: int) -> Values:
        options.say(f"{method}, {workers} workers, {epochs} epochs")
        task = table(UNITS * workers, 16)
        task = Stationary(task.train, task.test, task.make_model)
        settings = Schedule(workers, workers, epochs, 0.0, momentum=0.0)

        def mean(lr: float, seed: int) -> float:
            return float(np.mean(train(task, replace(settings, lr=lr), method, seed)["loss"][:-1]))

        return np.array([min(mean(lr, seed) for lr in RATES) for seed in seeds])

    by_time = {epochs: least(CD_GRAB, 4, epochs) for epochs in EPOCHS}
    by_workers = {
        m: by_time[EPOCHS[-1]] if m == 4 else least(CD_GRAB, m, EPOCHS[-1]) for m in FLEETS
    }
    at_random = least(D_RR, 4, EPOCHS[-1])
    powers = [
        [slope(list(each), [values[i] for values in each.values()]) for i in range(len(seeds))]
        for each in (by_time, by_workers)
    ]
    rows = [("epochs", n, f"{values.mean():.2e}") for n, values in by_time.items()]
    rows += [("workers", n, f"{values.mean():.2e}") for n, values in by_workers.items()]
    rows.append(("epochs, D-RR", EPOCHS[-1], f"{at_random.mean():.2e}"))
    claims = [
        within("the mean squared gradient falls with the epochs at least by a power of -2/3",
               "(m n T)^(-2/3)", powers[0], high=-2 / 3),
        # the bound has a term in 1 / T without m: workers tell only where it is the smaller one
        at_scale(within("and with the workers: a linear speedup", "(m n T)^(-2/3)", powers[1],
                        high=-2 / 3), float(np.mean(powers[0])) > -0.85),
        higher("it is smaller than that of random reshuffling (percent)", "a faster rate",
               100 * (1 - by_time[EPOCHS[-1]] / at_random)),
    ]  # fmt: skip
    return Finding(("what", "number", "mean squared gradient"), rows, claims)
