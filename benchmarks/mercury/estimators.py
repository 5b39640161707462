"""Bias and variance of the estimators on one small example.

Groups of 4, 10, 6, 20 and 8 samples with unequal means, batches of 8, d = 2 groups, and a cache
that is exact, or exact for two thirds of the samples and 0 for the others.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench import Options, Run
from benchmarks.tables import Case, Vector
from flwr_hetero.mercury.algorithm import (
    Groups,
    draw_flat,
    draw_two_level,
    inverse_probs,
    mixed_probs,
)

SIZES, LEVELS, BATCH, CHOSEN = (4, 10, 6, 20, 8), (1.0, 8.0, 0.5, 2.5, 4.0), 8, 2
EQUAL = (10, 10, 10, 10)
Draw = Callable[[Vector, Groups, np.random.Generator], tuple[NDArray[np.int64], Vector]]


def flat(mixing: float) -> Draw:
    def draw(importance: Vector, groups: Groups, rng: np.random.Generator):
        indices = draw_flat(importance, (1, BATCH), mixing, rng)[0]
        probs = mixed_probs(importance, mixing, indices)
        return indices, inverse_probs(probs, len(importance))

    return draw


def paper(importance: Vector, groups: Groups, rng: np.random.Generator):
    return draw_two_level(importance, groups, BATCH, CHOSEN, rng)


def uniform(importance: Vector, groups: Groups, rng: np.random.Generator):
    return rng.integers(len(importance), size=BATCH), np.ones(BATCH)


CYCLE, STEP = (0, 1, 2, 3, 4), (3,)
CASES: dict[str, tuple[Draw, tuple[int, ...], bool, tuple[int, ...]]] = {
    "uniform": (uniform, SIZES, True, CYCLE),
    "flat, exact cache": (flat(0.5), SIZES, True, CYCLE),
    "flat, partly zero cache": (flat(0.5), SIZES, False, CYCLE),
    "paper, exact cache, over a cycle": (paper, SIZES, True, CYCLE),
    "paper, exact cache, at one step": (paper, SIZES, True, STEP),
    "paper, partly zero cache": (paper, SIZES, False, CYCLE),
    "paper, equal groups, over a cycle": (paper, EQUAL, True, CYCLE[:4]),
    "paper, equal groups, at one step": (paper, EQUAL, True, STEP),
    "mistake: no mixing": (flat(0.0), SIZES, False, CYCLE),
}
"""Estimator, sizes of the groups, whether the cache is exact, groups whose turn it is."""


def plan(options: Options) -> Iterator[Run]:
    batches = 1000 if options.fast else 20_000
    for name in CASES:
        yield Run({"experiment": "estimator", "name": name, "batches": batches})


def run(case: Case) -> dict[str, Any]:
    """Return bias in % with its standard error, and variance per batch over uniform's."""
    draw, sizes, exact, turns = CASES[case["name"]]
    rng, batches = np.random.default_rng(0), case["batches"]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    groups = Groups(np.arange(bounds[-1]), bounds, 0, max(sizes))
    gradients = np.repeat(LEVELS[: len(sizes)], sizes) + rng.exponential(size=bounds[-1])
    importance = gradients.copy()
    if not exact:
        importance[::3] = 0.0
    rng, found = np.random.default_rng(1), []
    for number in range(batches):
        indices, weights = draw(importance, groups._replace(turn=turns[number % len(turns)]), rng)
        found.append(float((weights * gradients[indices]).mean()))
    mean, truth = np.mean(found), gradients.mean()
    figures = {
        "bias_percent": round(100 * (mean / truth - 1), 2),
        "error_percent": round(100 * np.std(found) / np.sqrt(batches) / truth, 2),
        "variance_of_uniform": round(np.var(found) / (gradients.var() / BATCH), 2),
    }
    return {"metrics": figures}
