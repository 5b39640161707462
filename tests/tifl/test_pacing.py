from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import TierState, policy_probs
from flwr_hetero.tifl.pacing import (
    LEAST_ERROR,
    TimeEstimate,
    paced_credits,
    paper_estimate,
    steer,
    weigh_tiers,
)
from flwr_hetero.tifl.tiers import Tiers

NAN = float("nan")
LATENCY = np.array([0.25, 0.5, 1.0, 2.0, 10.0])


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        ([0.25, 0.5, 1, 2, 10], [16, 8, 4, 2, 1]),  # the paper's CPU shares
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1] * 5),
        ([0, 1, 1, 1, 1], [16, 1, 1, 1, 1]),  # a clock too coarse
        ([0] * 5, [1] * 5),
    ],
)
def test_paced_credits_by_hand(latency, expected):
    assert paced_credits(np.array(latency, float)).tolist() == expected


@pytest.mark.parametrize(
    ("accuracy", "latency", "weights"),
    [
        ([0.8, 0.6], [1, 1], [1, 4]),
        ([80.0, 60.0], [1, 16], [8, 4]),  # in percent
        ([-0.5, -1.0], [1, 1], [1, 4]),  # losses
        ([0.5, NAN, 0.7], [1, 1, 1], [25, 16, 9]),  # the mean of the others
        ([NAN, NAN], [1, 16], [8, 1]),
        ([1.0, 1.0], [1, 1], [1, 1]),
        ([1.0, 0.5], [1, 1], [1, 100]),  # at least a tenth of the largest error
    ],
)
def test_weigh_tiers_by_hand(accuracy, latency, weights):
    chances = weigh_tiers(np.array(accuracy), np.array(latency, float))
    np.testing.assert_allclose(chances, np.array(weights) / np.sum(weights))


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_a_lower_accuracy_is_never_rarer(accuracy):
    before = weigh_tiers(np.array(accuracy), LATENCY)
    for tier in range(5):
        lower = np.array(accuracy)
        lower[tier] /= 2
        after = weigh_tiers(lower, LATENCY)
        assert after[tier] >= before[tier] * (1 - 1e-9)
        assert after.min() >= LEAST_ERROR**2 * 40**-0.75 / 5
        assert after.sum() == pytest.approx(1)


def test_steer_averages_and_keeps_what_is_known():
    state = state_of(np.ones(3) / 3, np.full(3, np.inf))
    for accuracy in ([0.8, NAN, 0.4], [0.6, 0.5, NAN]):
        state = steer(state, np.array(accuracy), np.ones(3))
    np.testing.assert_allclose(state.accuracy, [0.7, 0.5, 0.4])
    np.testing.assert_allclose(state.probs, np.array([9, 25, 36]) / 70)
    same = steer(state, None, np.array([1.0, 1.0, 16.0]))  # tiers were formed again
    np.testing.assert_allclose(same.accuracy, state.accuracy)
    np.testing.assert_allclose(same.probs, np.array([9, 25, 36 / 8]) / 38.5)


# --- section 4.5 -------------------------------------------------------------------------


def state_of(probs, credits=(np.inf, np.inf)):
    full = np.array(credits, float)
    return TierState(np.array(probs), np.full(len(full), NAN), full, full)


def tiers_of(mean, square):
    return Tiers({}, {}, boundaries=[2.0], seconds=[1.0, 4.0], slowest_s=mean, slowest_s2=square)


ONE_NODE = tiers_of([1.0, 4.0], [1.0, 16.0])


@pytest.mark.parametrize(("policy", "seconds"), [("slow", 46242), ("fast", 1837)])
def test_paper_estimate_on_table_2(policy, seconds):
    """The outer tiers' latencies follow from "slow" and "fast" in 500 rounds."""
    latency = np.array([1837 / 500, 9, 9, 9, 46242 / 500])
    assert paper_estimate(latency, policy_probs(policy, 5), 500) == pytest.approx(seconds)


def test_time_estimate_adds_up_rounds():
    estimate, tiers = TimeEstimate(), tiers_of([1.0, 5.0], [1.0, 26.0])
    estimate.expect(1, tiers, state_of([0.5, 0.5]), "uniform", None)
    estimate.expect(2, tiers, state_of([0.5, 0.5]), "uniform", np.array([0.0, 1.0]))
    assert (estimate.paper_s, estimate.exact_s, estimate.actual_s) == (10.5, 13.0, 0.0)
    assert estimate.within_s2 == 0.5 * 1 + 2 * 1
    unknown = TimeEstimate()
    unknown.expect(1, Tiers({}, {}), state_of([0.5, 0.5]), "uniform", None)
    assert unknown == TimeEstimate()


def test_variance_of_independent_draws_adds_up():
    estimate = TimeEstimate()
    for _ in range(10):
        estimate.expect(1, ONE_NODE, state_of([0.5, 0.5]), "uniform", None)
    assert estimate.between_s2 == pytest.approx(10 * 1.5**2)
    assert estimate.within_s2 == 0
    low, high = estimate.forecast().low, estimate.forecast().high
    assert high - low == pytest.approx(2 * 1.96 * 1.5 * np.sqrt(10))


@pytest.mark.parametrize("num_rounds", [1, 3, 4, 6])
def test_variance_of_a_permutation_equals_all_orders(num_rounds):
    """A period of three fast rounds and a slow one."""
    orders = permutations([1.0, 1.0, 1.0, 4.0])
    times = [sum(order[: num_rounds % 4]) for order in orders]
    estimate = TimeEstimate()
    estimate.expect(num_rounds, ONE_NODE, state_of([0.5, 0.5], [3.0, 1.0]), "paced", None)
    assert estimate.between_s2 == pytest.approx(np.var(times))
    assert estimate.exact_s == pytest.approx(num_rounds // 4 * 7 + np.mean(times))
