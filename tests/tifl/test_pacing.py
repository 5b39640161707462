import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import TierState, draw_tier
from flwr_hetero.tifl.pacing import (
    LEAST_ERROR,
    MOST_DUE,
    carry_over,
    draw_weights,
    first_state,
    paced_credits,
    steer,
    was_drawn,
    weigh_tiers,
)

NAN = float("nan")
LATENCY = np.array([0.25, 0.5, 1.0, 2.0, 10.0])


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        ([0.25, 0.5, 1, 2, 10], [16, 8, 4, 2, 1]),  # the paper's CPU shares
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1] * 5),
        ([1, 2, 2, 3, 4], [3, 2, 2, 1, 1]),
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
        ([80.0, 60.0], [1, 1], [1, 4]),  # in percent
        ([-0.5, -1.0], [1, 1], [1, 4]),  # losses
        ([0.8, 0.6], [1, 16], [8, 4]),
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
    state = TierState.first(np.ones(3) / 3, np.full(3, np.inf), np.ones(3))
    state = steer(state, np.array([0.8, NAN, 0.4]))
    state = steer(state, np.array([0.6, 0.5, NAN]))
    np.testing.assert_allclose(state.accuracy, [0.7, 0.5, 0.4])
    np.testing.assert_allclose(state.probs, np.array([9, 25, 36]) / 70)


@pytest.mark.parametrize(
    ("policy", "probs"), [("adaptive", [0.2, 0.8]), ("algorithm-2", [0.3, 0.7]), ("slow", [0, 1])]
)
def test_new_tiers_go_on_with_what_was_known(policy, probs):
    before = TierState.first(np.array([0.3, 0.7]), np.full(2, 9.0), np.ones(2))._replace(
        accuracy=np.array([0.8, 0.6]), credits=np.array([4.0, 5.0]), due=np.array([0.5, -0.5])
    )
    new = first_state(policy, 2, [9, 9], np.array([2.0, 2.0]))
    after = carry_over(before, new, policy, with_credits=True)
    np.testing.assert_allclose(after.probs, probs)
    np.testing.assert_allclose(after.accuracy, [0.8, 0.6])
    assert after.credits.tolist() == [4, 5]
    assert after.due.tolist() == [0.5, -0.5]
    assert carry_over(before, new, policy, with_credits=False).credits.tolist() == [9, 9]
    fewer = first_state(policy, 2, [9, 9], np.array([2.0]))
    assert carry_over(before, fewer, policy, with_credits=True) is fewer
    assert fewer.credits.tolist() == [18]


def rounds_per_tier(accuracy, num_rounds=500, possible=None):
    """Rounds of each tier with these accuracies all the time."""
    state = TierState.first(np.ones(5) / 5, np.full(5, np.inf), LATENCY)
    state, rng, counts = steer(state, np.array(accuracy)), np.random.default_rng(0), np.zeros(5)
    for number in range(num_rounds):
        weights, state = draw_weights(state, "adaptive")
        here = np.ones(5, bool) if possible is None else possible(number)
        tier, _, state = draw_tier(state, weights, here, rng)
        state = was_drawn(state, tier)
        counts[tier] += 1
        assert np.abs(state.due).max() <= MOST_DUE
    return counts, state.probs


@pytest.mark.parametrize(
    ("worst", "tier", "low", "high"), [(0, 0, 450, 480), (4, 4, 150, 215), (None, 4, 10, 20)]
)
def test_rounds_follow_accuracy_and_latency(worst, tier, low, high):
    """Within two rounds of the probabilities; accuracies change the slow tier's tenfold."""
    counts, probs = rounds_per_tier([0.1 if j == worst else 0.8 for j in range(5)])
    np.testing.assert_allclose(counts, 500 * probs, atol=MOST_DUE)
    assert low <= counts[tier] <= high


def test_a_tier_that_was_away_does_not_make_up_for_it():
    back = 100  # before this round tier 0 is away
    counts, probs = rounds_per_tier(
        [0.8] * 5, 200, lambda number: (np.arange(5) > 0) | (number >= back)
    )
    assert counts[0] <= 100 * probs[0] + 2 * MOST_DUE
