"""Theorems 1 and 2, measured: sums of the random walk, and how gradients fall."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_hetero.cd_grab.algorithm import pair_balance, walk_balance
from flwr_hetero_studies.core.criteria import PAIRS, at_scale, fact, higher, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.cd_grab.orders import CD_GRAB, D_RR
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask, table
from flwr_hetero_studies.papers.cd_grab.train import Schedule, train
from flwr_hetero_studies.papers.cd_grab.vectors import slope

LENGTHS = (64, 512, 4096)
"""Steps of the walks."""
DIM = 16
FAILURE = 0.1
"""Share of walks that may pass the bound."""


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


def furthest_sums(num_walks: int, seed: int) -> Vector:
    """Return the largest number of the sums of walks: (lengths, walks, 2), random and greedy."""
    rng = np.random.default_rng(seed)
    furthest = np.empty((len(LENGTHS), num_walks, 2))
    for place in np.ndindex(furthest.shape[:2]):
        length = LENGTHS[place[0]]
        diffs = rng.normal(size=(length, DIM))
        diffs /= np.linalg.norm(diffs, axis=1, keepdims=True)
        walk = walk_balance(np.zeros(DIM), diffs, walk_threshold(length, FAILURE), rng)[1]
        greedy = pair_balance(np.zeros(DIM), diffs)[1]
        # over all prefixes
        furthest[place] = [
            np.abs(np.cumsum(signs[:, None] * diffs, axis=0)).max() for signs in (walk, greedy)
        ]
    return furthest


def theorem_1(options: Options) -> Finding:
    num_walks = options.pick(20, 100)
    # seeds, lengths, walks, random and greedy
    sums = np.array([furthest_sums(num_walks, seed) for seed in options.seeds_or(range(PAIRS))])
    bounds = np.array([walk_bound(length, DIM, FAILURE) for length in LENGTHS])
    largest_share = (sums[..., 0] > bounds[:, None]).mean(axis=(0, 2)).max()
    means = sums.mean(axis=2)
    powers = [slope(LENGTHS, of_seed) for of_seed in means[:, :, 0]]
    rows = []
    for i, length in enumerate(LENGTHS):
        walk, greedy = means[:, i].mean(axis=0)
        largest = sums[:, i, :, 0].max()
        cells = (f"{bounds[i]:.1f}", f"{walk:.2f}", f"{largest:.2f}", f"{greedy:.2f}")
        rows.append((length, *cells))
    claims = [
        fact(f"of walks at most a part of {FAILURE} passes the bound at any vector", "with "
             "probability 1 - delta", f"at most {largest_share:.3f}",
             largest_share <= FAILURE),
        within("their sums grow like a logarithm: with a power of at most 0.2 of their number",
               "logarithms", powers, high=0.2, form=".2f"),
        higher("greedy signs, which no theorem is about, keep sums shorter (of 4096)",
               "in practice", means[:, -1, 0] - means[:, -1, 1]),
    ]  # fmt: skip
    head = ("vectors", "bound", "walk: mean", "walk: largest", "greedy: mean")
    return Finding(head, rows, claims)


@dataclass(frozen=True)
class Stationary(OrderTask):
    """A task whose ``loss`` is the squared norm of the gradient, which Theorem 2 bounds."""

    def look(self, model: nn.Module) -> dict[str, float]:
        inputs, targets = self.train.take(np.arange(len(self.train)))
        parts = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
        return {"loss": float(sum(part.square().sum() for part in parts))}


UNITS = 32
"""Units of each worker."""
EPOCHS = (4, 8, 16)
FLEETS = (1, 4, 8)
RATES = (0.1, 0.3)


def theorem_2(options: Options) -> Finding:
    """Take the mean squared gradient over T epochs at the best of some rates, as the theorem."""
    seeds = options.seeds_or(range(PAIRS))

    def least(method: str, workers: int, epochs: int) -> Vector:
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
        # the bound has a term in 1 / T without m: workers only matter where that term is smaller
        at_scale(within("and with the workers: a linear speedup", "(m n T)^(-2/3)", powers[1],
                        high=-2 / 3), float(np.mean(powers[0])) > -0.85),
        higher("it is smaller than that of random reshuffling (percent)", "a faster rate",
               100 * (1 - by_time[EPOCHS[-1]] / at_random)),
    ]  # fmt: skip
    return Finding(("what", "number", "mean squared gradient"), rows, claims)
