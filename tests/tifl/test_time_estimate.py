import numpy as np
import pytest
from oracles.tifl import mean_of_all_draws

from flwr_hetero.tifl.algorithm import Tiering, policy_probs
from flwr_hetero.tifl.time_estimate import (
    TimeEstimate,
    expected_round_times,
    expected_slowest,
    mape,
    paper_estimate,
)

PAPER_LATENCY = 1 / np.repeat([[4.0, 2.0, 1.0, 0.5, 0.1]], 10, axis=1)
PAPER_TIER = np.repeat(np.arange(5), 10)


@pytest.mark.parametrize(("policy", "seconds"), [("slow", 46242), ("fast", 1837)])
def test_paper_estimate_on_table_2(policy, seconds):
    """The outer tiers' latencies follow from "slow" and "fast" in 500 rounds."""
    latency = np.array([1837 / 500, 9, 9, 9, 46242 / 500])
    assert paper_estimate(latency, policy_probs(policy, 5), 500) == pytest.approx(seconds)


def test_mape_is_relative_to_the_actual_time():
    assert mape(110, 100) == pytest.approx(10)
    assert mape(90, 100) == pytest.approx(10)


@pytest.mark.parametrize("num_selected", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("latency", [[3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], [0.0, 7.0], [2.0]])
def test_expected_slowest_equals_all_draws(latency, num_selected):
    mean = mean_of_all_draws(latency, num_selected)
    assert expected_slowest(np.array(latency), num_selected) == pytest.approx(mean)


@pytest.mark.parametrize("num_selected", [1, 5, 1000, 999_999, 1_000_000])
def test_expected_slowest_of_a_million_nodes(num_selected):
    """The expected largest of c numbers drawn from 1..n is c (n + 1) / (c + 1)."""
    n = 1_000_000
    exact = num_selected * (n + 1) / (num_selected + 1)
    assert expected_slowest(np.arange(1.0, n + 1), num_selected) == pytest.approx(exact, rel=1e-9)


def test_expected_speed_ups_on_the_papers_fleet():
    """Not the paper's "6x for uniform", which its own Table 2 contradicts."""
    (vanilla,) = expected_round_times(PAPER_LATENCY, np.zeros(50, int), 5)
    assert vanilla == pytest.approx(7.4446, abs=1e-4)
    times = expected_round_times(PAPER_LATENCY, PAPER_TIER, 5)
    for policy, times_faster in {"uniform": 2.7, "random": 8.0, "fast": 29.8, "slow": 0.74}.items():
        assert vanilla / (policy_probs(policy, 5) @ times) == pytest.approx(times_faster, rel=0.007)


def test_time_estimate_adds_up_rounds():
    tiering = Tiering(np.array([0, 1, -1, 1]), np.array([2.0]), np.array([1.0, 4.0]))
    rounds = np.array([[1.0, 3.0, np.nan, 5.0], [1.0, np.nan, np.nan, 5.0]])  # the NaN counts as 3
    estimate = TimeEstimate()
    estimate.set_tiers(rounds, tiering, clients_per_round=2)
    estimate.expect_round(np.array([0.5, 0.5]))
    estimate.expect_round(np.array([0.0, 1.0]))
    assert estimate.info() == {"paper_estimate_s": 6.5, "exact_estimate_s": 8.0, "actual_s": 0.0}
