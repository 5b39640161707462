"""Groups, the two draws with their weights, and the size of a group, each against an oracle."""

from itertools import combinations
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import mercury as oracle

from flwr_hetero.mercury.algorithm import (
    BETA,
    MARGIN,
    Groups,
    advance,
    allocate,
    check_groups,
    choose_groups,
    draw_flat,
    draw_two_level,
    error_probability,
    group_size,
    inverse_probs,
    make_groups,
    mixed_probs,
    resize,
    speedup,
)

IMPORTANCE = arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 2.0**20, width=32))


def make(num_samples: int, num_groups: int) -> Groups:
    return make_groups(num_samples, num_groups, np.random.default_rng(0))


def unequal(sizes: tuple[int, ...]) -> Groups:
    order = np.random.default_rng(1).permutation(sum(sizes))
    return Groups(order, np.concatenate([[0], np.cumsum(sizes)]), 0, max(sizes))


def test_error_probability_brackets_the_gradient() -> None:
    logits = np.random.default_rng(0).normal(scale=3, size=(500, 7))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    upper = np.linalg.norm(probs - np.eye(7)[0], axis=1)
    error = error_probability(-np.log(probs[:, 0]))
    assert (error <= upper * (1 + 1e-9)).all()
    assert (upper <= np.sqrt(2) * error * (1 + 1e-9)).all()


# --- groups --------------------------------------------------------------------------------


@given(st.integers(1, 60), st.lists(st.integers(1, 70), max_size=20), st.data())
def test_a_cycle_visits_each_sample_once(n: int, sizes: list[int], data: st.DataObject) -> None:
    groups = make(n, data.draw(st.integers(1, n)))
    seen: list[int] = []
    for size in [*sizes, *[(sizes or [groups.size])[-1]] * 2 * n]:  # of whatever sizes
        groups = resize(groups, size)
        check_groups(groups, n)
        assert len(groups.members(groups.turn)) <= size
        seen += groups.members(groups.turn).tolist()
        groups = advance(groups)
        if groups.turn == 0:
            assert sorted(seen) == list(range(n))
            seen = []


def test_a_new_size_holds_at_once() -> None:
    groups = resize(advance(make(100, 10)), 45)
    assert groups.sizes.tolist() == [10, 45, 45]
    assert advance(advance(groups)).sizes.tolist() == [33, 33, 34]


@pytest.mark.parametrize("num_groups", [0, -1, 11])
def test_make_groups_refuses(num_groups: int) -> None:
    with pytest.raises(ValueError, match="num_groups must be"):
        make(10, num_groups)


@pytest.mark.parametrize(
    "damage",
    [
        {"order": np.zeros(6, dtype=np.int64)},
        {"order": np.arange(5)},
        {"bounds": np.array([0, 3])},
        {"bounds": np.array([0, 3, 3, 6])},
        {"bounds": np.array([0, 4, 3, 6])},
        {"bounds": np.array([1, 3, 6])},
        {"bounds": np.array([], dtype=np.int64)},
        {"turn": 2},
        {"turn": -1},
        {"size": 0},
    ],
)
def test_check_groups_refuses(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="groups must partition 6 samples"):
        check_groups(make(6, 2)._replace(**damage), 6)


# --- probabilities, weights, the flat draw -------------------------------------------------


@given(IMPORTANCE, st.floats(0.05, 1.0))
def test_weights_recover_the_mean_and_are_bounded(importance: np.ndarray, mixing: float) -> None:
    probs = mixed_probs(importance, mixing)
    np.testing.assert_allclose(probs, oracle.flat_probs(importance, mixing))
    assert probs.sum() == pytest.approx(1.0)
    weights = inverse_probs(probs, len(probs))
    assert weights.max() <= 1.0 / mixing * (1 + 1e-9)
    gradients = np.arange(1.0, len(probs) + 1)
    assert (probs * weights * gradients).sum() == pytest.approx(gradients.mean())
    some = np.array([[0, len(probs) - 1]])
    assert mixed_probs(importance, mixing, some).tolist() == probs[some].tolist()


def test_without_mixing_a_zero_is_never_drawn() -> None:
    assert mixed_probs(np.array([1.0, 0.0]), 0.0).tolist() == [1.0, 0.0]
    assert mixed_probs(np.zeros(2), 0.0).tolist() == [0.5, 0.5]
    drawn = draw_flat(np.array([0.0, 1.0, 0.0, 2.0, 0.0]), (50, 4), 0.0, np.random.default_rng(0))
    assert set(drawn.ravel().tolist()) == {1, 3}


@pytest.mark.parametrize("point", [0.0, np.nextafter(1.0, 0.0)])
def test_an_extreme_point_draws_no_zero(point: float) -> None:
    rng = Mock(random=lambda size=None: np.full(size or (), point))
    rng.integers = lambda num, size: np.zeros(size, dtype=np.int64)
    drawn = draw_flat(np.array([0.0, 0.1, 0.2, 0.3, 0.0]), (1, 2), 0.0, rng)
    assert set(drawn.ravel().tolist()) == {1 if point == 0.0 else 3}


@pytest.mark.parametrize("zeros", [0, 3, 500])
@pytest.mark.parametrize("mixing", [0.3, 1.0])
def test_draw_flat_follows_its_probabilities(zeros: int, mixing: float) -> None:
    importance = np.random.default_rng(0).exponential(size=500) ** 2
    importance[:zeros] = 0.0
    drawn = draw_flat(importance, (6000, 10), mixing, np.random.default_rng(3))
    assert drawn.shape == (6000, 10)
    expected = 60_000 * oracle.flat_probs(importance, mixing)
    z = (np.bincount(drawn.ravel(), minlength=500) - expected) / np.sqrt(expected)
    assert np.abs(z).max() < 5.5


def test_the_uniform_share_of_a_batch_is_rounded() -> None:
    importance = np.eye(1, 500, 7)[0]
    batches = draw_flat(importance, (1, 3), 0.5, np.random.default_rng(6))
    for seed in range(4000):
        batch = draw_flat(importance, (1, 3), 0.5, np.random.default_rng(seed))
        batches = np.concatenate([batches, batch])
    assert (batches == 7).mean() == pytest.approx(0.5 + 0.5 / 500, abs=0.015)
    assert set((batches == 7).sum(axis=1).tolist()) <= {1, 2, 3}


# --- the paper's two levels ----------------------------------------------------------------


def test_groups_are_chosen_by_successive_draws() -> None:
    groups, rng = make(40, 4)._replace(turn=1), np.random.default_rng(0)
    probs = oracle.group_probs(np.array([0, -3, -2, -1]), BETA)
    found = [tuple(sorted(choose_groups(groups, 2, rng).tolist())) for _ in range(6000)]
    for chosen in combinations(range(4), 2):
        prob = oracle.successive(probs, chosen)
        tolerance = 4.5 * np.sqrt(prob * (1 - prob) / 6000)
        assert found.count(chosen) / 6000 == pytest.approx(prob, abs=tolerance)


@pytest.mark.parametrize(
    ("num_draws", "sizes", "expected"),
    [
        (8, (4, 10, 2), [2, 5, 1]),
        (4, (100, 1, 1), [2, 1, 1]),
        (3, (1, 1, 1), [1, 1, 1]),
        (7, (1, 1), [4, 3]),
        (5, (9,), [5]),
    ],
)
def test_allocate(num_draws: int, sizes: tuple[int, ...], expected: list[int]) -> None:
    assert allocate(num_draws, np.array(sizes)).tolist() == expected


def test_two_levels_draw_and_weigh_to_the_letter() -> None:
    rng, groups = np.random.default_rng(0), unequal((4, 10, 6, 20, 8))
    importance = np.where(np.arange(48) % 2, rng.exponential(size=48), 0.0)
    owner = {int(i): group for group in range(5) for i in groups.members(group)}
    for _ in range(50):
        indices, weights = draw_two_level(importance, groups, 9, 3, rng)
        chosen = [owner[int(index)] for index in indices]
        numbers, counts = np.unique(chosen, return_counts=True)
        assert len(numbers) == 3
        assert sorted(counts) == sorted(allocate(9, groups.sizes[numbers]))
        for index, group, weight in zip(indices, chosen, weights, strict=True):
            members = groups.members(group)
            prob = importance[index] / importance[members].sum()
            assert weight == pytest.approx(1 / (len(members) * prob))


def expected_mean(groups: Groups, gradients: np.ndarray) -> float:
    """Mean estimate of the paper over one cycle: it depends on the chosen groups alone."""
    num_groups, mean = len(groups.sizes), 0.0
    for turn in range(num_groups):
        steps = np.where(np.arange(num_groups) < turn, 0, -num_groups) + np.arange(num_groups)
        for chosen in combinations(range(num_groups), 2):
            counts = allocate(8, groups.sizes[list(chosen)])
            means = [gradients[groups.members(group)].mean() for group in chosen]
            prob = oracle.successive(oracle.group_probs(steps, BETA), chosen)
            mean += prob * np.average(means, weights=counts) / num_groups
    return mean


@pytest.mark.parametrize(("sizes", "biased"), [((10,) * 4, False), ((4, 10, 6, 20, 8), True)])
def test_the_paper_is_biased_with_unequal_groups(sizes: tuple[int, ...], biased: bool) -> None:
    groups, gradients = unequal(sizes), np.random.default_rng(2).exponential(size=sum(sizes))
    for group, level in enumerate((1.0, 8.0, 0.5, 2.5, 4.0)[: len(sizes)]):
        gradients[groups.members(group)] += level
    ratio = expected_mean(groups, gradients) / gradients.mean()
    assert (abs(ratio - 1) > 0.03) == biased
    assert abs(ratio - 1) < 1e-9 or biased


# --- section 4.3 and Eq. 5 -----------------------------------------------------------------


@given(st.floats(0, 1e6), st.floats(1e-6, 10), st.integers(1, 10**6))
def test_a_group_fits_into_the_idle_time(idle_s: float, score_s: float, samples: int) -> None:
    size = group_size(idle_s, score_s, samples)
    assert 0 <= size <= samples
    assert size * score_s <= idle_s
    if size < samples:
        assert (size + 1) * score_s > MARGIN * idle_s * (1 - 1e-9)


def test_free_scores_make_one_group_of_all() -> None:
    assert group_size(0.0, 0.0, 50) == 0
    assert group_size(1.0, 0.0, 50) == 50


def test_speedup_by_hand() -> None:
    assert speedup(1.0, 0.0, 1.0, 1.0) == 1.0
    assert speedup(0.4, 2.0, 1.0, 3.0) == pytest.approx(1 / (0.4 * 1.5))
