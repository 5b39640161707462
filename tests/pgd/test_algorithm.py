"""Algorithms 1 and 2 against the same written out example by example."""

import math

import numpy as np
import pytest
from oracles.pgd import learn_one

from flwr_hetero.pgd import algorithm as pgd


@pytest.mark.parametrize("computed_at", [0, 4, 8, 9])
@pytest.mark.parametrize("slope", [-0.3, 0.0, 0.2])
def test_learn_follows_algorithm_2(computed_at, slope):
    values = [-1e6, -2.0, -1e-3, 0.0, 1e-3, 0.5, 7.0, 1e6]
    before, priorities = (part.ravel() for part in np.meshgrid([*values, math.nan], values))
    start = np.full(len(before), slope), np.full(len(before), computed_at)
    now = pgd.learn(pgd.Trend(before, *start), np.arange(len(before)), priorities, iteration=9)
    for k, (p_j, p_i) in enumerate(zip(before, priorities, strict=True)):
        p, a, at = learn_one(p_j, slope, computed_at, p_i, 9)
        assert (now.priority[k], now.computed_at[k]) == (p, at)
        assert now.slope[k] == pytest.approx(a, abs=1e-9)


def test_trend_by_hand():
    # ln 8 -> ln 2 over 2 iterations: -0.693; then ln 2 -> ln 4 over 1: 0.8 * 0.693 - 0.2 * 0.555
    trend = pgd.start_trend(1)
    log2 = math.log(2)
    for priority, iteration, slope in ((8, 0, 0), (2, 2, -0.8 * log2), (4, 3, 0.64 * log2)):
        trend = pgd.learn(trend, np.array([0]), np.array([float(priority)]), iteration)
        assert trend.slope[0] == pytest.approx(slope)
    assert pgd.estimate(trend, 5)[0] == pytest.approx(4 * math.exp(2 * trend.slope[0]))


def test_estimate_is_bounded_and_nan_if_unknown():
    trend = pgd.Trend(np.array([1.0, -1.0]), np.array([5.0, -5.0]), np.array([0, 0]))
    np.testing.assert_allclose(pgd.estimate(trend, 2), [math.exp(10), -math.exp(-10)])
    far = pgd.estimate(trend, 10**6)
    np.testing.assert_allclose(far, [math.exp(pgd.MAX_EXPONENT), -math.exp(-pgd.MAX_EXPONENT)])
    assert np.isnan(pgd.estimate(pgd.start_trend(3), 7)).all()


@pytest.mark.parametrize("num_top", [0, 1, 5, 14])
@pytest.mark.parametrize("taken", [[], [3], [0, 2, 7, 9, 11], list(range(12))])
def test_pick_top_is_a_full_sort(num_top, taken):
    priority = np.random.default_rng(num_top).permutation(12) - 6.0
    left = [i for i in np.argsort(-priority).tolist() if i not in taken]
    found = pgd.pick_top(priority, num_top, np.array(taken, dtype=np.int64)).tolist()
    assert found == sorted(left[:num_top])


def test_pick_top_takes_unknown_last():
    priority = np.array([np.nan, -3.0, np.nan, -5.0])
    for num_top, first in ((2, [1, 3]), (4, [0, 1, 2, 3])):
        assert pgd.pick_top(priority, num_top, np.empty(0, np.int64)).tolist() == first


def test_choose_batch_wraps_and_extrapolates():
    # example 1 grows from 1 to 4, example 0 falls from 9 to 5: next 12.1 and 3.1
    trend = pgd.learn(pgd.start_trend(4), np.arange(4), np.array([9.0, 1.0, 0.0, 3.5]), 0)
    trend = pgd.learn(trend, np.arange(4), np.array([5.0, 4.0, 0.0, 3.5]), 1)
    order = np.array([2, 3, 0, 1])
    for turn, expected in ((0, [2, 1]), (2, [0, 1]), (3, [1, 3]), (4, [2, 1]), (7, [1, 3])):
        chosen = pgd.choose_batch(trend, order, turn, 2, num_renewed=1, num_top=1)
        assert chosen.tolist() == expected
    assert pgd.choose_batch(trend, order, 3, 2, num_renewed=3, num_top=0).tolist() == [1, 2, 3]


def test_top_share_by_hand():
    assert pgd.top_share(np.array([4.0]), 0.01) == 1.0
    assert pgd.top_share(np.array([5.0, -2.0, 1.0, 4.0]), 0.6) == pytest.approx(9 / 8)
    assert math.isnan(pgd.top_share(np.array([1.0, -1.0]), 0.5))


@pytest.mark.parametrize("mixing", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("scores", [[3.0], [0.0, -1e6, 1e300], [2.0] * 7, range(40)])
def test_shuffle_holds_counts_rounded(scores, mixing):
    wanted = pgd.expected_counts(np.array(scores, dtype=np.float64), mixing)
    np.testing.assert_allclose(wanted.mean(), 1.0, rtol=1e-6)
    assert (wanted >= mixing * (1 - 1e-9)).all()
    for seed in range(10):
        epoch = pgd.weighted_shuffle(wanted, np.random.default_rng(seed))
        times = np.bincount(epoch, minlength=len(scores))
        assert len(epoch) == len(scores) == len(times)
        assert (times >= np.floor(wanted - 1e-6)).all()
        assert (times <= np.ceil(wanted + 1e-6)).all()


def test_shuffle_is_unbiased_at_every_place():
    wanted = np.array([2.3, 0.2, 0.9, 0.6])
    rng = np.random.default_rng(0)
    epochs = np.array([pgd.weighted_shuffle(wanted, rng) for _ in range(20_000)])
    for place in epochs.T:
        found = np.bincount(place, minlength=4) / len(place)
        np.testing.assert_allclose(found, wanted / 4, atol=0.015)
