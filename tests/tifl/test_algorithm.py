import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.tifl import accumulated_dropouts, redraw_until_credits, tie_averaged_rank

from flwr_hetero.tifl.algorithm import (
    STATIC_POLICIES,
    TierState,
    change_probs,
    draw_tier,
    histogram_tiers,
    median_latency,
    place,
    policy_probs,
    quantile_tiers,
    resample,
    sampling_rates,
    start_credits,
    update_probs,
)

NAN, INF = float("nan"), float("inf")
PAPER_LATENCY = 1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10)
latencies = st.lists(
    st.one_of(st.floats(0, 1e6), st.sampled_from([1.0, 2.0, 3.0])), min_size=1
).map(np.array)
accuracies = st.lists(
    st.one_of(st.floats(0, 1), st.just(0.5), st.just(NAN)), min_size=1, max_size=12
).map(np.array)
either = pytest.mark.parametrize("make", [quantile_tiers, histogram_tiers])


def state_of(probs, credits=None, full_credits=None):
    full = np.array(full_credits or [INF] * len(probs), float)
    state = TierState.first(np.array(probs, float), full)
    return state if credits is None else state._replace(credits=np.array(credits, float))


# --- section 4.2 -----------------------------------------------------------------------


def test_median_latency_by_hand():
    rounds = np.array([[12.0, 10.0, 9.9, NAN], [1.0, 11.0, 9.9, NAN], [2.0, 10.0, 9.8, 3.0]])
    latency, dropout = median_latency(rounds, t_max=10)
    assert latency.tolist() == [2.0, 10.0, 9.9, 10.0]
    assert dropout.tolist() == [False, True, False, False]


@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.3, 0.7, NAN]), min_size=4, max_size=4), min_size=1)
)
def test_dropouts_equal_the_accumulated_rule(rows):
    rounds = np.array(rows)
    assert np.array_equal(median_latency(rounds, 0.7)[1], accumulated_dropouts(rounds, 0.7))


def test_quantiles_find_the_papers_five_groups():
    shuffled = np.random.default_rng(0).permutation(PAPER_LATENCY)
    tiering = quantile_tiers(shuffled, 5)
    assert tiering.sizes.tolist() == [10] * 5
    assert tiering.latency.tolist() == [0.25, 0.5, 1.0, 2.0, 10.0]
    assert np.array_equal(tiering.latency[tiering.tier], shuffled)
    assert tiering.boundaries.tolist() == [0.375, 0.75, 1.5, 6.0]


@pytest.mark.parametrize(
    ("seconds", "num_tiers", "sizes"),
    [
        ([1] * 8 + [2, 3], 3, [8, 1, 1]),
        ([1] + [5] * 9, 2, [1, 9]),
        ([3, 3], 5, [2]),
        ([1, 2, 3, 4, 5, 6, 7], 3, [2, 2, 3]),
        ([1, 2, 2, 2, 3, 4, 5, 6], 3, [4, 2, 2]),
    ],
)
def test_quantile_sizes_are_even_but_for_ties(seconds, num_tiers, sizes):
    assert quantile_tiers(np.array(seconds, float), num_tiers).sizes.tolist() == sizes


def test_histogram_drops_empty_bins():
    # bins of width 2.25 from 1: [1, 3.25) [3.25, 5.5) [5.5, 7.75) [7.75, 10]
    tiering = histogram_tiers(np.array([1.0, 2.0, 3.0, 9.0, 10.0]), 4)
    assert tiering.tier.tolist() == [0, 0, 0, 1, 1]
    assert tiering.boundaries.tolist() == [6.0]


@given(latencies, st.integers(1, 8))
def test_histogram_equals_numpys(seconds, num_tiers):
    edges = np.linspace(seconds.min(), seconds.max(), num_tiers + 1)
    if np.diff(edges).min(initial=1) < 1e-9:
        return  # bins narrower than rounding: nothing to compare
    counts = np.histogram(np.sort(seconds), bins=num_tiers)[0]
    assert histogram_tiers(seconds, num_tiers).sizes.tolist() == counts[counts > 0].tolist()


@either
@given(latencies, st.integers(1, 8))
def test_tiers_are_ordered_and_complete(make, seconds, num_tiers):
    tiering = make(np.append(seconds, NAN), num_tiers)
    tier = tiering.tier[:-1]
    assert tiering.tier[-1] == -1
    assert tiering.sizes.min() >= 1
    assert tiering.sizes.sum() == len(seconds)
    assert tiering.num_tiers == len(tiering.boundaries) + 1 <= min(num_tiers, len(set(seconds)))
    for j in range(tiering.num_tiers):
        assert tiering.latency[j] == np.median(seconds[tier == j])
        assert j == 0 or seconds[tier < j].max() < seconds[tier >= j].min()
    assert np.array_equal(place(seconds, tiering.boundaries), tier)


@given(latencies, st.integers(1, 8))
def test_quantiles_waste_no_tier(seconds, num_tiers):
    assert quantile_tiers(seconds, num_tiers).num_tiers == min(num_tiers, len(set(seconds)))


@given(st.lists(st.floats(0, 1e6), min_size=1, unique=True), st.integers(1, 8))
def test_quantiles_without_ties_are_even(seconds, num_tiers):
    sizes = quantile_tiers(np.array(seconds), num_tiers).sizes
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("fast", [1.0, np.nextafter(1.0, 2.0)])  # halves round up and down
def test_neighbouring_floats_are_separated(fast):
    assert quantile_tiers(np.array([np.nextafter(fast, 2.0), fast]), 2).tier.tolist() == [1, 0]


# --- section 4.3 -----------------------------------------------------------------------

TABLE_1 = """
slow    0.0    0.0    0.0    0.0    1.0
uniform 0.2    0.2    0.2    0.2    0.2
random  0.7    0.1    0.1    0.05   0.05
fast    1.0    0.0    0.0    0.0    0.0
fast1   0.225  0.225  0.225  0.225  0.1
fast2   0.2375 0.2375 0.2375 0.2375 0.05
fast3   0.25   0.25   0.25   0.25   0.0
"""


def test_static_policies_are_table_1():
    rows = [line.split() for line in TABLE_1.strip().splitlines()]
    assert list(STATIC_POLICIES) == [policy for policy, *_ in rows]
    for policy, *probs in rows:
        assert policy_probs(policy, 5).tolist() == [float(prob) for prob in probs]


@pytest.mark.parametrize(
    ("policy", "num_tiers", "probs"),
    [
        ("slow", 3, [0, 0, 1]),
        ("fast", 3, [1, 0, 0]),
        ("uniform", 4, [0.25] * 4),
        ("adaptive", 2, [0.5, 0.5]),
        ("fast1", 2, [0.9, 0.1]),
        ("fast2", 3, [0.475, 0.475, 0.05]),
        ("fast3", 3, [0.5, 0.5, 0]),
        ("random", 2, [0.85, 0.15]),
        ("random", 10, [0.35, 0.35, 0.05, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025]),
        ("vanilla", 1, [1]),
        ([0.5, 0.25, 0.25], 3, [0.5, 0.25, 0.25]),
    ],
)
def test_policies_of_other_numbers_of_tiers(policy, num_tiers, probs):
    np.testing.assert_allclose(policy_probs(policy, num_tiers), probs, atol=1e-15)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 4))
def test_resample_keeps_shares(share, num_tiers, split):
    share = np.array(share)
    assert resample(share, num_tiers).sum() == pytest.approx(share.sum(), abs=1e-9)
    finer = resample(share, split * len(share))
    np.testing.assert_allclose(finer, np.repeat(share, split) / split, atol=1e-9)


# --- Algorithm 2 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "weights"),
    [
        ([0.9, 0.5, 0.7, 0.6, 0.8], [1, 5, 3, 4, 2]),
        ([0.9, 0.5, 0.5, 0.2], [1, 2.5, 2.5, 4]),
        ([0.9, NAN, 0.5], [1.5, 2, 2.5]),
        ([NAN, NAN], [1, 1]),
        ([-2.0, -0.1], [2, 1]),  # minus a loss
    ],
)
def test_change_probs_by_hand(accuracy, weights):
    expected = np.array(weights) / np.sum(weights)
    np.testing.assert_allclose(change_probs(np.array(accuracy)), expected)


@given(accuracies)
def test_change_probs_equals_tie_averaged_rank(accuracy):
    probs, m = change_probs(accuracy), len(accuracy)
    np.testing.assert_allclose(probs, tie_averaged_rank(accuracy))
    assert probs.min() >= 2 / (m * (m + 1)) - 1e-12  # no tier starves


@pytest.mark.parametrize(
    ("now", "before", "changes"),
    [(0.5, 0.6, True), (0.5, 0.5, True), (0.6, 0.5, False), (NAN, 0.5, False), (0.5, NAN, False)],
)
def test_update_probs_only_without_improvement(now, before, changes):
    state = state_of([0.5, 0.5])._replace(accuracy=np.array([0.1, before]))
    after = update_probs(state, np.array([0.9, now]), current=1)
    assert (after.probs.tolist() != [0.5, 0.5]) == changes
    np.testing.assert_array_equal(after.accuracy, [0.9, before if np.isnan(now) else now])
    assert update_probs(state, np.array([0.9, now]), current=None).probs.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("latency", "credits"),
    [
        ([0.25, 0.5, 1, 2, 10], [16, 8, 4, 2, 1]),  # the paper's CPU shares
        ([3.0] * 5, [1] * 5),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1] * 5),
        ([1, 2, 2, 3, 4], [3, 2, 2, 1, 1]),
        ([1e-6, 1, 1, 1, 1], [16, 1, 1, 1, 1]),
        ([0, 1, 1, 1, 1], [16, 1, 1, 1, 1]),  # a clock too coarse
        ([0] * 5, [1] * 5),
    ],
)
def test_paced_credits_follow_speed(latency, credits):
    assert start_credits("paced", np.array(latency, float)).tolist() == credits


def test_credits_without_pace():
    latency = np.array([1.0, 2.0])
    assert start_credits(None, latency).tolist() == [INF, INF]
    assert start_credits(4, latency).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("credits", "possible", "eligible", "after"),
    [
        ([2, 2, 2], [1, 1, 1], [1, 1, 1], [2, 2, 2]),
        ([0, 2, 2], [1, 1, 1], [0, 1, 1], [0, 2, 2]),
        ([2, 0, 2], [0, 1, 1], [0, 0, 1], [2, 0, 2]),
        ([0, 0, 0], [1, 1, 1], [1, 1, 1], [5, 4, 3]),  # refilled
        ([2, 0, 0], [0, 1, 1], [0, 1, 1], [7, 4, 3]),  # those with credits have no nodes
    ],
)
def test_draw_tier_spends_one_credit(credits, possible, eligible, after):
    state = state_of([0.2, 0.3, 0.5], credits, full_credits=[5, 4, 3])
    tier, probs, new = draw_tier(state, np.array(possible, bool), np.random.default_rng(1))
    weights = np.array([0.2, 0.3, 0.5]) * eligible
    np.testing.assert_allclose(probs, weights / weights.sum())
    after[tier] -= 1
    assert new.credits.tolist() == after
    assert state.credits.tolist() == credits


def test_draw_tier_has_the_law_of_redrawing():
    probs, credits, rng = [0.5, 0.2, 0.1, 0.2], [3, 0, 1, 2], np.random.default_rng(3)
    state = state_of(probs, credits)
    drawn = [draw_tier(state, np.ones(4, bool), rng)[0] for _ in range(8000)]
    twin = [redraw_until_credits(probs, credits, rng) for _ in range(8000)]
    # five standard deviations of the difference of two shares near 0.5 are 0.040
    difference = np.bincount(drawn, minlength=4) - np.bincount(twin, minlength=4)
    assert np.abs(difference / 8000).max() < 0.04
    assert 1 not in drawn


def test_draw_tier_is_uniform_without_probability():
    rng, possible = np.random.default_rng(0), np.array([False, True, True])
    assert draw_tier(state_of([1.0, 0.0, 0.0]), possible, rng)[1].tolist() == [0.0, 0.5, 0.5]


def test_draw_tier_takes_one_random_number():
    rng, twin = np.random.default_rng(5), np.random.default_rng(5)
    draw_tier(state_of([0.2] * 5), np.ones(5, bool), rng)
    twin.random()
    assert rng.random() == twin.random()


# --- section 4.6 -----------------------------------------------------------------------


def test_sampling_rates_by_hand():
    rates = sampling_rates(np.array([0.5, 0.3, 0.2]), np.array([20, 10, 4]), 5)
    np.testing.assert_allclose(rates, [0.125, 0.15, 0.2])  # all of 4 nodes


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "arguments", "rule"),
    [
        (quantile_tiers, ([1.0], 0), "num_tiers must be a whole number of at least 1, got 0"),
        (quantile_tiers, ([], 2), "latency must hold finite seconds"),
        (histogram_tiers, ([NAN, NAN], 2), "latency must hold finite seconds"),
        (histogram_tiers, ([1.0, -1.0], 2), "latency must hold finite seconds"),
        (quantile_tiers, ([1.0, INF], 2), "latency must hold finite seconds"),
        (policy_probs, ("quick", 5), "policy must be one of adaptive, vanilla, slow, .*'quick'"),
        (policy_probs, ("vanilla", 5), "num_tiers must be 1 for policy 'vanilla'"),
        (policy_probs, ([0.5, 0.5], 3), "policy must have num_tiers=3 entries"),
        (policy_probs, ([[0.5, 0.5]], 2), "policy must have num_tiers=2 entries"),
        (policy_probs, ([0.5, 0.4], 2), "policy must hold probabilities that sum to 1"),
        (policy_probs, ([1.5, -0.5], 2), "policy must hold probabilities"),
        (policy_probs, ([NAN, 1.0], 2), "policy must hold probabilities"),
    ],
)
def test_bad_arguments_are_refused(call, arguments, rule):
    first, second = arguments
    with pytest.raises(ValueError, match=rule):
        call(np.array(first) if call != policy_probs else first, second)
