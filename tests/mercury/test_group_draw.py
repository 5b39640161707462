"""The two-level draw: exact over all choices of groups, with the spec's tempting mistakes."""

from collections.abc import Callable
from itertools import combinations, permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_hetero.mercury import algorithm as group_draw
from flwr_hetero.mercury.algorithm import (
    Groups,
    allocate,
    choose_groups,
    draw_batch,
    group_probs,
    make_groups,
    mixed_probs,
    relative_steps,
)

SIZES = (4, 10, 6, 20, 8)
CHOSEN = 2
Estimator = Callable[..., tuple[NDArray[np.int64], NDArray[np.float64]]]


def unequal_groups(sizes: tuple[int, ...] = SIZES) -> Groups:
    total = sum(sizes)
    order = np.random.default_rng(1).permutation(total)
    return Groups(order, np.concatenate([[0], np.cumsum(sizes)]), 0, max(sizes))


def gradients_of(groups: Groups) -> NDArray[np.float64]:
    """One number per sample, with unequal group means."""
    rng = np.random.default_rng(2)
    gradients = np.empty(len(groups.order))
    for group, level in enumerate((1.0, 8.0, 0.5, 2.5, 4.0)[: len(groups.sizes)]):
        members = groups.members(group)
        gradients[members] = level + rng.exponential(size=len(members))
    return gradients


def successive(probs: NDArray[np.float64], chosen: tuple[int, ...]) -> float:
    """Chance that successive draws without replacement give this set."""
    chance = 0.0
    for path in permutations(chosen):
        left, product = 1.0, 1.0
        for group in path:
            product *= probs[group] / left
            left -= probs[group]
        chance += product
    return chance


def expectation(
    estimator: Estimator, importance: NDArray[np.float64], groups: Groups, beta: float = 1.0
) -> float:
    """Expected mean of weights * gradients over a cycle: exact in the groups, 4,000 draws each."""
    gradients, rng = gradients_of(groups), np.random.default_rng(3)
    num_groups, mean = len(groups.sizes), 0.0
    for turn in range(num_groups):
        groups = groups._replace(turn=turn)
        probs = group_probs(relative_steps(groups), beta)
        for chosen in combinations(range(num_groups), CHOSEN):
            indices, weights = estimator(importance, groups, np.array(chosen), rng)
            mean += successive(probs, chosen) * float((weights * gradients[indices]).mean())
    return mean / num_groups


def ours(per_cycle: bool, mixing: float) -> Estimator:
    def estimate(
        importance: NDArray[np.float64],
        groups: Groups,
        chosen: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_draw, "choose_groups", lambda *_: chosen)
            return draw_batch(
                importance,
                groups,
                batch_size=4000,
                num_chosen=CHOSEN,
                beta=1.0,
                mixing=mixing,
                per_cycle=per_cycle,
                rng=rng,
            )

    return estimate


def good_importance(groups: Groups) -> NDArray[np.float64]:
    return gradients_of(groups)


def stale_importance(groups: Groups) -> NDArray[np.float64]:
    return np.random.default_rng(4).permutation(gradients_of(groups))


def zero_for_some(groups: Groups) -> NDArray[np.float64]:
    importance = gradients_of(groups)
    importance[::3] = 0.0
    importance[groups.members(2)] = 0.0
    return importance


TOLERANCE = 0.01
"""Relative; at least 4.5 standard errors of the 50 x 4,000 draws."""


@pytest.mark.parametrize("make", [good_importance, stale_importance, zero_for_some])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 30.0])
def test_cycle_is_unbiased_for_any_sizes_beta_and_cache(
    make: Callable[[Groups], NDArray[np.float64]], beta: float
) -> None:
    groups = unequal_groups()
    found = expectation(ours(per_cycle=True, mixing=0.5), make(groups), groups, beta)
    assert found == pytest.approx(gradients_of(groups).mean(), rel=TOLERANCE)


def test_the_paper_is_biased_with_unequal_groups() -> None:
    groups = unequal_groups()
    found = expectation(ours(per_cycle=False, mixing=0.0), good_importance(groups), groups, 30.0)
    assert abs(found / gradients_of(groups).mean() - 1) > 3 * TOLERANCE


def test_the_paper_is_unbiased_over_a_cycle_of_equal_groups() -> None:
    groups = unequal_groups((10, 10, 10, 10))
    found = expectation(ours(per_cycle=False, mixing=0.0), good_importance(groups), groups)
    assert found == pytest.approx(gradients_of(groups).mean(), rel=TOLERANCE)


def test_the_paper_is_biased_at_a_single_step_even_with_equal_groups() -> None:
    groups = unequal_groups((10, 10, 10, 10))._replace(turn=2)
    gradients, rng = gradients_of(groups), np.random.default_rng(0)
    indices, weights = draw_batch(
        gradients, groups, batch_size=20_000, num_chosen=1, beta=30.0, mixing=0.0,
        per_cycle=False, rng=rng,
    )  # fmt: skip
    newest = gradients[groups.members(1)].mean()
    assert (weights * gradients[indices]).mean() == pytest.approx(newest, rel=0.02)
    assert abs(newest / gradients.mean() - 1) > 0.3


# --- tempting mistakes, each of which the check above must see ----------------------------


def mistake(kind: str) -> Estimator:
    """A naive twin of the draw, 500 batches of 8 at once, with one mistake in it."""

    def estimate(
        importance: NDArray[np.float64],
        groups: Groups,
        chosen: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        all_indices, all_weights = [], []
        chances = group_probs(relative_steps(groups), 1.0)
        for group, count in zip(chosen, allocate(8, groups.sizes[chosen]), strict=True):
            members = groups.members(group)
            probs = mixed_probs(importance[members], 0.0 if kind == "zero importance" else 0.5)
            replace = kind != "without replacement in a group"
            count = min(count, len(members))
            keys = rng.gumbel(size=(500, len(members))) + np.log(np.maximum(probs, 1e-300))
            drawn = (
                rng.choice(len(members), (500, count), p=probs)
                if replace
                else np.argsort(-keys, axis=1)[:, :count]
            )
            times_chosen = CHOSEN / len(groups.sizes)
            if kind == "inclusion probability d r":
                times_chosen = CHOSEN * chances[group]
            weights = 1.0 / (times_chosen * count * len(groups.order) * probs[drawn])
            all_indices.append(members[drawn])
            all_weights.append(weights)
        indices, weights = np.hstack(all_indices), np.hstack(all_weights)
        if kind == "clipped weights":
            weights = np.minimum(weights, 1.5 * weights.mean())
        return indices.ravel(), weights.ravel() * indices.shape[1]

    return estimate


@pytest.mark.parametrize(
    "kind",
    [
        "inclusion probability d r",
        "without replacement in a group",
        "clipped weights",
        "zero importance",
    ],
)
def test_tempting_mistakes_are_biased(kind: str) -> None:
    groups = unequal_groups()
    found = expectation(mistake(kind), zero_for_some(groups), groups)
    assert abs(found / gradients_of(groups).mean() - 1) > 3 * TOLERANCE


def test_the_mistakes_differ_from_the_truth_by_the_mistake_alone() -> None:
    groups = unequal_groups()
    found = expectation(mistake("none"), zero_for_some(groups), groups)
    assert found == pytest.approx(gradients_of(groups).mean(), rel=TOLERANCE)


# --- the pieces ----------------------------------------------------------------------------


def test_groups_are_chosen_by_successive_draws() -> None:
    steps, rng = np.array([0, -2, -1, -3]), np.random.default_rng(0)
    probs = group_probs(steps, 0.7)
    found = [tuple(sorted(choose_groups(steps, 0.7, 2, rng).tolist())) for _ in range(6000)]
    for chosen in combinations(range(4), 2):
        chance = successive(probs, chosen)
        share = found.count(chosen) / len(found)
        assert share == pytest.approx(chance, abs=4.5 * np.sqrt(chance * (1 - chance) / 6000))


def test_a_huge_beta_neither_overflows_nor_runs_out_of_groups() -> None:
    steps = np.arange(-50, 0)
    assert group_probs(steps, 1e6)[-1] == 1.0
    chosen = choose_groups(steps, 1e6, 3, np.random.default_rng(0))
    assert sorted(chosen.tolist()) == [47, 48, 49]


@pytest.mark.parametrize(
    ("num_draws", "sizes", "expected"),
    [(8, (4, 10, 2), (2, 5, 1)), (4, (100, 1, 1), (2, 1, 1)), (3, (1, 1, 1), (1, 1, 1)),
     (7, (1, 1), (4, 3)), (5, (9,), (5,))],
)  # fmt: skip
def test_allocate(num_draws: int, sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert allocate(num_draws, np.array(sizes)).tolist() == list(expected)


def test_a_batch_has_its_size_and_stays_in_its_groups() -> None:
    rng = np.random.default_rng(0)
    groups = make_groups(50, 7, rng)
    for _ in range(20):
        indices, weights = draw_batch(
            np.ones(50), groups, batch_size=9, num_chosen=3, beta=1.0, mixing=0.5,
            per_cycle=True, rng=rng,
        )  # fmt: skip
        assert indices.shape == weights.shape == (9,)
        owners = {g for g in range(7) if np.isin(groups.members(g), indices).any()}
        assert len(owners) <= 3
