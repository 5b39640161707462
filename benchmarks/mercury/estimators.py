"""Bias and variance of every estimator, and of the mistakes near them, on one small example.

Usage: ``python benchmarks/mercury/estimators.py [--batches 20000]``; prints a table and writes
``estimators.jsonl``. Groups of 4, 10, 6, 20 and 8 samples with unequal means, batches of 8, d = 2
groups, beta = 1, a cache that is exact for two thirds of the samples and 0 for the others.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.mercury.algorithm import (
    Groups,
    allocate,
    choose_groups,
    draw_batch,
    group_probs,
    mixed_probs,
    relative_steps,
)
from flwr_hetero.mercury.importance_cache import ImportanceCache

SIZES, LEVELS, BATCH, CHOSEN, BETA = (4, 10, 6, 20, 8), (1.0, 8.0, 0.5, 2.5, 4.0), 8, 2, 1.0
Vector = NDArray[np.float64]
Draw = Callable[[Groups, np.random.Generator], tuple[NDArray[np.int64], Vector]]


def example(sizes: tuple[int, ...]) -> tuple[Groups, Vector, Vector]:
    """Make groups, one-dimensional gradients and a partly empty cache."""
    rng = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    groups = Groups(np.arange(bounds[-1]), bounds, 0, max(sizes))
    gradients = np.repeat(LEVELS[: len(sizes)], sizes) + rng.exponential(size=bounds[-1])
    importance = gradients.copy()
    importance[::3] = 0.0
    return groups, gradients, importance


def two_level(importance: Vector, per_cycle: bool, mixing: float) -> Draw:
    def draw(groups: Groups, rng: np.random.Generator) -> tuple[NDArray[np.int64], Vector]:
        return draw_batch(
            importance, groups, batch_size=BATCH, num_chosen=CHOSEN, beta=BETA, mixing=mixing,
            per_cycle=per_cycle, rng=rng,
        )  # fmt: skip

    return draw


def flat(importance: Vector, mixing: float) -> Draw:
    cache = ImportanceCache(len(importance))
    cache.set(np.arange(len(importance)), importance, step=0)

    def draw(groups: Groups, rng: np.random.Generator) -> tuple[NDArray[np.int64], Vector]:
        indices = cache.draw((1, BATCH), mixing, rng)[0]
        return indices, cache.weights(indices, mixing)

    return draw


def uniform(groups: Groups, rng: np.random.Generator) -> tuple[NDArray[np.int64], Vector]:
    return rng.integers(len(groups.order), size=BATCH), np.ones(BATCH)


def mistaken(importance: Vector, kind: str) -> Draw:
    """Make the cycle estimator with one mistake in it."""

    def draw(groups: Groups, rng: np.random.Generator) -> tuple[NDArray[np.int64], Vector]:
        steps = relative_steps(groups)
        chosen = choose_groups(steps, BETA, CHOSEN, rng)
        indices, weights = [], []
        for group, count in zip(chosen, allocate(BATCH, groups.sizes[chosen]), strict=True):
            members = groups.members(group)
            probs = mixed_probs(importance[members], 0.0 if kind == "zero" else 0.5)
            replace = kind != "without replacement"
            count = count if replace else min(count, len(members))
            if kind == "zero" and not importance[members].any():
                probs = np.full(len(members), 1 / len(members))
            replace = replace or count > np.count_nonzero(probs)
            drawn = rng.choice(len(members), size=count, replace=replace, p=probs)
            times = CHOSEN / len(groups.sizes)
            if kind == "inclusion d r":
                times = CHOSEN * group_probs(steps, BETA)[group]
            indices.append(members[drawn])
            weights.append(1.0 / (times * count * len(groups.order) * probs[drawn]))
        weight = np.concatenate(weights)
        if kind == "clipped":
            weight = np.minimum(weight, 1.5 * weight.mean())
        weight = weight / weight.sum() if kind == "self-normalised" else weight
        return np.concatenate(indices), weight * len(weight)

    return draw


def measure(draw: Draw, groups: Groups, gradients: Vector, batches: int, turns: list[int]) -> dict:
    """Return bias in % with its standard error, and variance per batch over uniform's."""
    rng, found = np.random.default_rng(1), []
    for number in range(batches):
        indices, weights = draw(groups._replace(turn=turns[number % len(turns)]), rng)
        found.append(float((weights * gradients[indices]).mean()))
    mean, truth = np.mean(found), gradients.mean()
    return {
        "bias_percent": round(100 * (mean / truth - 1), 2),
        "error_percent": round(100 * np.std(found) / np.sqrt(batches) / truth, 2),
        "variance_of_uniform": round(np.var(found) / (gradients.var() / BATCH), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20_000)
    batches = parser.parse_args().batches
    groups, gradients, cache = example(SIZES)
    equal, equal_gradients, _ = example((10, 10, 10, 10))
    cycle, step = list(range(5)), [3]
    rows = {
        "uniform": (uniform, groups, gradients, cycle),
        "flat, exact cache": (flat(gradients, 0.5), groups, gradients, cycle),
        "flat, partly zero cache": (flat(cache, 0.5), groups, gradients, cycle),
        "cycle, over a cycle": (two_level(cache, True, 0.5), groups, gradients, cycle),
        "cycle, exact cache": (two_level(gradients, True, 0.5), groups, gradients, cycle),
        "cycle, at one step": (two_level(cache, True, 0.5), groups, gradients, step),
        "paper, exact cache, over a cycle": (
            two_level(gradients, False, 0.0), groups, gradients, cycle),
        "paper, exact cache, at one step": (
            two_level(gradients, False, 0.0), groups, gradients, step),
        "paper, partly zero cache": (two_level(cache, False, 0.0), groups, gradients, cycle),
        "paper, equal groups, over a cycle": (
            two_level(equal_gradients, False, 0.0), equal, equal_gradients, [0, 1, 2, 3]),
        "paper, equal groups, at one step": (
            two_level(equal_gradients, False, 0.0), equal, equal_gradients, step),
        **{
            f"mistake: {kind}": (mistaken(cache, kind), groups, gradients, cycle)
            for kind in ("inclusion d r", "without replacement", "clipped", "zero",
                         "self-normalised")
        },
    }  # fmt: skip
    lines = [{"estimator": n, **measure(*row[:3], batches, row[3])} for n, row in rows.items()]
    for line in lines:
        print(
            f"{line['estimator']:36s} {line['bias_percent']:8.2f} % "
            f"± {line['error_percent']:.2f}   variance {line['variance_of_uniform']:.2f}"
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (Path(__file__).parent / "estimators.jsonl").write_text(text)


if __name__ == "__main__":
    main()
