import re
from itertools import permutations

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from oracles.tifl import mean_of_all_draws
from tifl_toy import records_of

from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import TierState, policy_probs
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


def estimate_of(seconds=(1.0, 4.0)):
    """Two tiers of one node each."""
    estimate = TimeEstimate()
    estimate.set_tiers(np.array([seconds]), np.array([0, 1]), clients_per_round=2)
    return estimate


def state_of(probs, credits=(np.inf, np.inf)):
    return TierState.first(np.array(probs), np.array(credits), np.array([1.0, 4.0]))


def test_time_estimate_adds_up_rounds():
    tier = np.array([0, 1, -1, 1])
    rounds = np.array([[1.0, 3.0, np.nan, 5.0], [1.0, np.nan, np.nan, 5.0]])  # the NaN counts as 3
    estimate = TimeEstimate()
    estimate.set_tiers(rounds, tier, clients_per_round=2)
    estimate.expect(1, state_of([0.5, 0.5]), "uniform")
    estimate.expect(2, state_of([0.5, 0.5]), "uniform", np.array([0.0, 1.0]))
    assert estimate.info() == {"paper_estimate_s": 10.5, "exact_estimate_s": 13.0, "actual_s": 0.0}


def test_variance_of_independent_draws_adds_up():
    estimate = estimate_of()
    for _ in range(10):
        estimate.expect(1, state_of([0.5, 0.5]), "uniform")
    assert estimate.between_s2 == pytest.approx(10 * 1.5**2)
    assert estimate.within_s2 == 0


@pytest.mark.parametrize("num_rounds", [1, 3, 4, 6])
def test_variance_of_a_permutation_equals_all_orders(num_rounds):
    """A period of three fast rounds and a slow one."""
    orders = permutations([1.0, 1.0, 1.0, 4.0])
    times = [sum(order[: num_rounds % 4]) for order in orders]
    estimate = estimate_of()
    estimate.expect(num_rounds, state_of([0.5, 0.5], [3.0, 1.0]), "paced")
    assert estimate.between_s2 == pytest.approx(np.var(times))
    assert estimate.exact_s == pytest.approx(num_rounds // 4 * 7 + np.mean(times))


def test_run_takes_what_was_predicted(caplog):
    """One period and one round more, of nodes that are equally fast within a tier."""
    tifl = TiFL(FedAvg(fraction_evaluate=0.0), 2, policy="paced", profiling="phase")
    records_of(tifl, num_rounds=32)
    text = r"32 rounds take about (\S+) s \(95 %: (\S+) to (\S+) s\)"
    seconds, low, high = map(float, re.search(text, caplog.text).groups())
    assert seconds == pytest.approx(26 * 32 / 31, rel=1e-3)
    assert low < 26 + 0.25 <= tifl.estimate.actual_s <= 26 + 10
    assert high == pytest.approx(2 * seconds - low, rel=1e-3)
    assert f"expected {seconds:.4g} s (95 %" in caplog.text
