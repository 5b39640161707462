"""Profiling and tiering of TiFL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import histogram_tiers, median_latency, place, quantile_tiers

PAPER_LATENCY = 1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10)
NAN = float("nan")

latencies = st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from([1.0, 2.0, 3.0])), min_size=1)
either = pytest.mark.parametrize("make", [quantile_tiers, histogram_tiers])


# --- profiling ---------------------------------------------------------------------


def test_one_time_out_is_no_dropout():
    latency, dropout = median_latency([[1.0, NAN], [NAN, NAN], [2.0, NAN]], t_max=10)
    assert latency.tolist() == [2.0, 10.0]
    assert dropout.tolist() == [False, True]


def test_an_answer_after_t_max_is_a_time_out():
    latency, dropout = median_latency([[12.0, 10.0, 9.9], [1.0, 11.0, 9.9]], t_max=10)
    assert latency.tolist() == [5.5, 10.0, 9.9]
    assert dropout.tolist() == [False, True, False]


@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.3, 0.7, NAN]), min_size=4, max_size=4), min_size=1)
)
def test_dropout_is_the_papers_accumulated_rule(rows):
    t_max, rounds = 0.7, np.array(rows)
    accumulated = np.zeros(4)
    for row in rounds:  # L_i of section 4.2, step by step
        for node, seconds in enumerate(row):
            accumulated[node] += t_max if np.isnan(seconds) else min(seconds, t_max)
    assert np.array_equal(
        median_latency(rounds, t_max)[1], accumulated >= len(rounds) * t_max - 1e-9
    )


@pytest.mark.parametrize(
    ("rounds", "t_max", "message"),
    [
        ([[1.0]], 0, "t_max must be positive"),
        ([[1.0]], -1.0, "t_max must be positive"),
        ([[1.0]], NAN, "t_max must be positive"),
        ([[1.0]], float("inf"), "t_max must be positive and finite"),
        ([1.0], 5, "rounds must be"),
        (np.zeros((0, 3)), 5, "profile at least one round"),
        ([[1.0, -2.0]], 5, "rounds must hold no negative time, got -2.0"),
    ],
)
def test_bad_profiles_are_refused(rounds, t_max, message):
    with pytest.raises(ValueError, match=message):
        median_latency(rounds, t_max)


# --- tiers -------------------------------------------------------------------------


def test_quantiles_find_the_papers_five_groups():
    shuffled = np.random.default_rng(0).permutation(PAPER_LATENCY)
    tiering = quantile_tiers(shuffled, 5)
    assert tiering.sizes.tolist() == [10] * 5
    assert tiering.latency.tolist() == [0.25, 0.5, 1.0, 2.0, 10.0]
    assert np.array_equal(tiering.latency[tiering.tier], shuffled)
    assert tiering.boundaries.tolist() == [0.375, 0.75, 1.5, 6.0]


def test_quantiles_bend_to_ties_and_waste_no_tier():
    assert quantile_tiers([1.0] * 8 + [2.0, 3.0], 3).sizes.tolist() == [8, 1, 1]
    assert quantile_tiers([1.0] + [5.0] * 9, 2).sizes.tolist() == [1, 9]


def test_histogram_drops_empty_bins():
    # bins of width 2.25 from 1: [1, 3.25) [3.25, 5.5) [5.5, 7.75) [7.75, 10]
    tiering = histogram_tiers([1.0, 2.0, 3.0, 9.0, 10.0], 4)
    assert tiering.tier.tolist() == [0, 0, 0, 1, 1]
    assert tiering.boundaries.tolist() == [6.0]


@given(latencies, st.integers(1, 8))
def test_histogram_equals_numpys(seconds, num_tiers):
    ordered = np.sort(seconds)
    if np.diff(np.linspace(ordered[0], ordered[-1], num_tiers + 1)).min(initial=1) < 1e-9:
        return  # bins narrower than rounding: nothing to compare
    counts = np.histogram(ordered, bins=num_tiers)[0]
    assert histogram_tiers(seconds, num_tiers).sizes.tolist() == counts[counts > 0].tolist()


@either
@given(latencies, st.integers(1, 8))
def test_every_tiering_is_ordered_and_whole(make, seconds, num_tiers):
    tiering = make([*seconds, NAN], num_tiers)
    values = np.array(seconds)
    assert tiering.tier[-1] == -1
    assert tiering.sizes.min() >= 1
    assert tiering.sizes.sum() == len(seconds)
    assert tiering.num_tiers == len(tiering.boundaries) + 1 <= min(num_tiers, len(set(seconds)))
    for j in range(tiering.num_tiers - 1):  # no node of a tier is slower than the next tier
        assert values[tiering.tier[:-1] <= j].max() < values[tiering.tier[:-1] > j].min()
    for j in range(tiering.num_tiers):
        assert tiering.latency[j] == np.median(values[tiering.tier[:-1] == j])
    assert np.array_equal(place(seconds, tiering.boundaries), tiering.tier[:-1])


@given(latencies, st.integers(1, 8))
def test_quantiles_give_all_the_tiers_that_there_can_be(seconds, num_tiers):
    assert quantile_tiers(seconds, num_tiers).num_tiers == min(num_tiers, len(set(seconds)))


@given(st.lists(st.floats(0, 1e6), min_size=1, unique=True), st.integers(1, 8))
def test_quantiles_without_ties_are_even(seconds, num_tiers):
    sizes = quantile_tiers(seconds, num_tiers).sizes
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("fast", [1.0, np.nextafter(1.0, 2.0)])  # halves round up and down
def test_neighbouring_floats_are_told_apart(fast):
    assert quantile_tiers([np.nextafter(fast, 2.0), fast], 2).tier.tolist() == [1, 0]


@either
@pytest.mark.parametrize("num_tiers", [1, 5])
def test_equal_nodes_make_one_tier(make, num_tiers):
    tiering = make([3.0, 3.0], num_tiers)
    assert tiering.tier.tolist() == [0, 0]
    assert tiering.boundaries.shape == (0,)


def test_joiners_go_to_the_stored_tiers():
    tiering = quantile_tiers(PAPER_LATENCY, 5)
    assert place([0.0, 0.3, 1.9, 7.0, 1e9, NAN], tiering.boundaries).tolist() == [0, 0, 3, 4, 4, -1]
    assert place([7.0], []).tolist() == [0]


@either
@pytest.mark.parametrize(
    ("seconds", "num_tiers", "message"),
    [
        ([1.0], 0, "num_tiers must be at least 1, got 0"),
        ([], 2, "latency must hold at least one figure"),
        ([NAN, NAN], 2, "latency must hold at least one figure"),
        ([1.0, -1.0], 2, "latency must be finite and not negative"),
        ([1.0, float("inf")], 2, "latency must be finite and not negative"),
    ],
)
def test_bad_latencies_are_refused(make, seconds, num_tiers, message):
    with pytest.raises(ValueError, match=message):
        make(seconds, num_tiers)
