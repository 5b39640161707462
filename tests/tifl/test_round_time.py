"""Estimates of the training time of TiFL."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import policy_probs
from flwr_hetero.tifl.time_estimate import (
    expected_round_time,
    expected_slowest,
    mape,
    paper_estimate,
)

PAPER_LATENCY = 1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10)
PAPER_TIER = np.repeat(np.arange(5), 10)
ONE_TIER = np.zeros(50, dtype=int)


def test_eq_6_on_the_papers_table_2():
    """Slow 46242 s and fast 1837 s in 500 rounds give the outer tiers' latencies."""
    slow, fast = 46242 / 500, 1837 / 500
    assert paper_estimate([fast, 9, 9, 9, slow], policy_probs("slow", 5), 500) == pytest.approx(
        46242
    )
    assert paper_estimate([fast, 9, 9, 9, slow], policy_probs("fast", 5), 500) == pytest.approx(
        1837
    )


def test_the_error_is_relative_to_the_actual_time():
    assert mape(110, 100) == pytest.approx(10)
    assert mape(90, 100) == pytest.approx(10)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=7), st.integers(1, 7))
def test_the_expected_slowest_equals_counting_all_draws(latencies, num_selected):
    draws = list(combinations(latencies, min(num_selected, len(latencies))))
    mean = sum(max(draw) for draw in draws) / len(draws)
    assert expected_slowest(latencies, num_selected) == pytest.approx(mean)


@pytest.mark.parametrize("num_selected", [1, 5, 1000, 999_999, 1_000_000])
def test_a_million_nodes_are_exact(num_selected):
    """The expected largest of c numbers drawn from 1..n is c (n + 1) / (c + 1)."""
    n = 1_000_000
    exact = num_selected * (n + 1) / (num_selected + 1)
    assert expected_slowest(np.arange(1, n + 1), num_selected) == pytest.approx(exact, rel=1e-9)


def test_the_weights_are_the_binomials_of_the_formula():
    n, c = 60, 7
    for k in (c, 30, n):
        indicator = np.zeros(n)
        indicator[k - 1 :] = 1.0  # E = chance that the slowest has rank k or more
        exact = sum(comb(i - 1, c - 1) for i in range(k, n + 1)) / comb(n, c)
        assert expected_slowest(indicator, c) == pytest.approx(exact, rel=1e-12)


def test_the_papers_fleet_gives_the_derived_speed_ups():
    """Not the paper's "6x for uniform", which its own Table 2 contradicts."""
    vanilla = expected_round_time(PAPER_LATENCY, ONE_TIER, [1.0], 5)
    assert vanilla == pytest.approx(7.4446, abs=1e-4)
    for policy, times_faster in {"uniform": 2.7, "random": 8.0, "fast": 29.8, "slow": 0.74}.items():
        mean = expected_round_time(PAPER_LATENCY, PAPER_TIER, policy_probs(policy, 5), 5)
        assert vanilla / mean == pytest.approx(times_faster, rel=0.007)


@pytest.mark.parametrize("policy", ["uniform", "random", "fast1", [0.1, 0.2, 0.3, 0.2, 0.2]])
def test_the_expected_round_agrees_with_simulated_rounds(policy):
    rng = np.random.default_rng(1)
    latency, probs = rng.lognormal(size=50), policy_probs(policy, 5)
    times = []
    for tier in rng.choice(5, size=4000, p=probs):
        nodes = rng.choice(10, size=3, replace=False)
        times.append(latency[10 * tier + nodes].max())
    expected = expected_round_time(latency, PAPER_TIER, probs, 3)
    five_standard_errors = 5 * np.std(times) / np.sqrt(len(times))
    assert np.mean(times) == pytest.approx(expected, abs=five_standard_errors)


def test_measured_rounds_bring_the_jitter_in():
    rng = np.random.default_rng(2)
    base, jitter = np.linspace(1.0, 1.5, 10), 0.2
    measured = base * np.exp(jitter * rng.standard_normal((400, 10)))
    fresh = base * np.exp(jitter * rng.standard_normal((4000, 10)))
    actual = np.mean([rng.permutation(row)[:4].max() for row in fresh])
    tier, probs = np.zeros(10, dtype=int), [1.0]
    assert mape(expected_round_time(measured, tier, probs, 4), actual) < 2
    # the median alone, and still more Eq. 6, leave it out
    median = np.median(measured, axis=0)
    assert mape(expected_round_time(median, tier, probs, 4), actual) > 5
    assert mape(paper_estimate([median.mean()], probs, 1), actual) > 15


def test_nodes_that_are_not_placed_do_not_count():
    assert expected_round_time([1.0, 99.0, 2.0], [0, -1, 0], [1.0], 5) == 2.0


def test_tiers_without_a_chance_may_be_empty():
    assert expected_round_time([1.0], [0], [1.0, 0.0], 1) == 1.0
    with pytest.raises(ValueError, match="latencies must hold at least one node"):
        expected_round_time([1.0], [0], [0.5, 0.5], 1)


def test_nothing_drawn_is_refused():
    with pytest.raises(ValueError, match="num_selected must be at least 1, got 0"):
        expected_slowest([1.0], 0)
