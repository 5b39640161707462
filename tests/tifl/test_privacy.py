"""Sampling rates of static tier policies."""

import numpy as np
import pytest

from flwr_hetero.tifl.algorithm import policy_probs, privacy_report, sampling_rates


def test_rates_by_hand():
    rates = sampling_rates([0.5, 0.3, 0.2], [20, 10, 4], clients_per_round=5)
    np.testing.assert_allclose(rates.per_tier, [0.125, 0.15, 0.2])  # 4 nodes: all of them
    assert rates.q_max == pytest.approx(0.2)
    assert rates.q_known_tier == 1.0
    assert rates.q_vanilla == pytest.approx(5 / 34)


def test_rates_are_how_often_a_node_trains():
    rng, probs, sizes = np.random.default_rng(0), np.array([0.7, 0.2, 0.1]), np.array([10, 6, 20])
    first, rounds = np.cumsum(sizes) - sizes, 6000
    times = np.zeros(36)
    for tier in rng.choice(3, size=rounds, p=probs):
        times[first[tier] + rng.choice(sizes[tier], size=5, replace=False)] += 1
    expected = np.repeat(sampling_rates(probs, sizes, 5).per_tier, sizes)
    np.testing.assert_allclose(times / rounds, expected, atol=0.033)  # five standard deviations


def test_uniform_over_equal_tiers_is_as_good_as_vanilla():
    rates = sampling_rates(policy_probs("uniform", 5), [10] * 5, 5)
    assert rates.q_max == pytest.approx(rates.q_vanilla)
    assert sampling_rates(policy_probs("fast", 5), [10] * 5, 5).q_max == pytest.approx(0.5)


def test_a_tier_never_drawn_reveals_nothing():
    assert sampling_rates([1.0, 0.0], [50, 5], 5).q_known_tier == pytest.approx(0.1)


def test_the_report_prints_the_rates_and_both_caveats():
    text = privacy_report(sampling_rates(policy_probs("random", 5), [10] * 5, 5))
    assert "q_max = 0.35 (vanilla selection: 0.1)" in text
    assert "must stay secret" in text
    assert "q = 0.5 and not q_max" in text
    assert "static policies only" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5], [10], 5), "tier_sizes must be one positive size per tier"),
        (([0.5, 0.5], [10, 0], 5), "tier_sizes must be one positive size per tier"),
        (([1.0], [10], 0), "clients_per_round must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sampling_rates(*arguments)
