"""Groups, the two draws with their weights, and the size of a group, each against an oracle."""

from itertools import combinations
from unittest.mock import Mock

import numpy as np
import pytest
from oracles import mercury as oracle

from flwr_hetero.mercury import algorithm as mercury


def test_error_probability_brackets_the_gradient() -> None:
    logits = np.random.default_rng(0).normal(scale=3, size=(500, 7))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    upper = np.linalg.norm(probs - np.eye(7)[0], axis=1)
    error = mercury.error_probability(-np.log(probs[:, 0]))
    assert (error <= upper * (1 + 1e-9)).all()
    assert (upper <= np.sqrt(2) * error * (1 + 1e-9)).all()


@pytest.mark.parametrize("num_samples", [1, 7, 40])
@pytest.mark.parametrize("sizes", [[], [3], [70, 1, 5], [9, 2, 30, 30, 4, 11, 1]])
def test_cycle_visits_each_sample_once(num_samples: int, sizes: list[int]) -> None:
    for num_groups in {1, 2, num_samples // 3, num_samples} & {*range(1, num_samples + 1)}:
        rng = np.random.default_rng(0)
        seen = []
        groups = mercury.make_groups(num_samples, num_groups, rng)
        last = sizes[-1] if sizes else groups.size
        for size in [*sizes, *[last] * 2 * num_samples]:
            groups = mercury.resize(groups, size)
            assert len(groups.members(groups.turn)) <= size
            seen += groups.members(groups.turn).tolist()
            groups = mercury.advance(groups)
            if groups.turn == 0:
                assert sorted(seen) == list(range(num_samples))
                seen = []


@pytest.mark.parametrize("mixing", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("importance", [[3.0], [0.0, 0.0], [0.0, 2.0**20, 1.0], range(40)])
def test_weights_recover_the_mean(importance: list[float], mixing: float) -> None:
    values = np.array(importance, dtype=float)
    probs = mercury.mixed_probs(values, mixing)
    np.testing.assert_allclose(probs, oracle.flat_probs(values, mixing))
    weights = mercury.inverse_probs(probs, len(probs))
    assert weights.max() <= 1.0 / mixing * (1 + 1e-9)
    gradients = np.arange(1.0, len(probs) + 1)
    assert (probs * weights * gradients).sum() == pytest.approx(gradients.mean())


@pytest.mark.parametrize("point", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_point_draws_no_zero(point: float) -> None:
    rng = Mock(random=lambda size=None: np.full(size or (), point))
    rng.integers = lambda num, size: np.zeros(size, dtype=np.int64)
    drawn = mercury.draw_flat(np.array([0.0, 0.1, 0.2, 0.3, 0.0]), (1, 2), 0.0, rng)
    assert set(drawn.ravel().tolist()) == {1 if point == 0.0 else 3}


@pytest.mark.parametrize("zeros", [0, 3, 500])
@pytest.mark.parametrize("mixing", [0.3, 1.0])
def test_draw_flat_follows_its_probabilities(zeros: int, mixing: float) -> None:
    importance = np.random.default_rng(0).exponential(size=500) ** 2
    importance[:zeros] = 0.0
    drawn = mercury.draw_flat(importance, (6000, 10), mixing, np.random.default_rng(3))
    assert drawn.shape == (6000, 10)
    expected = 60_000 * oracle.flat_probs(importance, mixing)
    z = (np.bincount(drawn.ravel(), minlength=500) - expected) / np.sqrt(expected)
    assert np.abs(z).max() < 5.5


def test_groups_are_chosen_by_successive_draws() -> None:
    rng = np.random.default_rng(0)
    groups = mercury.make_groups(40, 4, rng)._replace(turn=1)
    probs = oracle.group_probs(np.array([0, -3, -2, -1]), mercury.BETA)
    found = [tuple(sorted(mercury.choose_groups(groups, 2, rng).tolist())) for _ in range(6000)]
    for chosen in combinations(range(4), 2):
        prob = oracle.successive(probs, chosen)
        tolerance = 4.5 * np.sqrt(prob * (1 - prob) / 6000)
        assert found.count(chosen) / 6000 == pytest.approx(prob, abs=tolerance)


@pytest.mark.parametrize(
    ("num_draws", "sizes", "expected"),
    [(8, (4, 10, 2), [2, 5, 1]), (4, (100, 1, 1), [2, 1, 1]), (7, (1, 1), [4, 3]), (5, (9,), [5])],
)
def test_allocate(num_draws: int, sizes: tuple[int, ...], expected: list[int]) -> None:
    assert mercury.allocate(num_draws, np.array(sizes)).tolist() == expected


def test_two_levels_draw_and_weigh_to_the_letter() -> None:
    rng = np.random.default_rng(0)
    groups = mercury.Groups(rng.permutation(48), np.array([0, 4, 14, 20, 40, 48]), 0, 20)
    importance = np.where(np.arange(48) % 2, rng.exponential(size=48), 0.0)
    owner = {int(i): group for group in range(5) for i in groups.members(group)}
    for _ in range(50):
        indices, weights = mercury.draw_two_level(importance, groups, 9, 3, rng)
        chosen = [owner[int(index)] for index in indices]
        numbers, counts = np.unique(chosen, return_counts=True)
        assert len(numbers) == 3
        assert sorted(counts) == sorted(mercury.allocate(9, groups.sizes[numbers]))
        for index, group, weight in zip(indices, chosen, weights, strict=True):
            members = groups.members(group)
            prob = importance[index] / importance[members].sum()
            assert weight == pytest.approx(1 / (len(members) * prob))


@pytest.mark.parametrize(
    ("idle_s", "score_s", "size"),
    [(0.0, 0.0, 0), (1.0, 0.0, 50), (1.0, 0.1, 9), (1.0, 0.4, 2), (9.0, 0.1, 50)],
)
def test_group_fits_into_the_idle_time(idle_s: float, score_s: float, size: int) -> None:
    assert mercury.group_size(idle_s, score_s, 50) == size
