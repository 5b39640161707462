"""Static tier policies and the draw of TiFL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import STATIC_POLICIES, draw_tier, policy_probs, resample

TABLE_1 = """
slow    0.0    0.0    0.0    0.0    1.0
uniform 0.2    0.2    0.2    0.2    0.2
random  0.7    0.1    0.1    0.05   0.05
fast    1.0    0.0    0.0    0.0    0.0
fast1   0.225  0.225  0.225  0.225  0.1
fast2   0.2375 0.2375 0.2375 0.2375 0.05
fast3   0.25   0.25   0.25   0.25   0.0
"""


@pytest.mark.parametrize("row", TABLE_1.strip().splitlines())
def test_five_tiers_give_table_1_to_the_bit(row):
    policy, *probs = row.split()
    assert policy_probs(policy, 5).tolist() == [float(prob) for prob in probs]


@pytest.mark.parametrize(
    ("policy", "num_tiers", "probs"),
    [
        ("slow", 3, [0, 0, 1]),
        ("fast", 3, [1, 0, 0]),
        ("uniform", 4, [0.25] * 4),
        ("fast1", 2, [0.9, 0.1]),
        ("fast2", 3, [0.475, 0.475, 0.05]),
        ("fast3", 3, [0.5, 0.5, 0]),
        ("random", 2, [0.85, 0.15]),
        ("random", 10, [0.35, 0.35, 0.05, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025]),
        ("vanilla", 1, [1]),
        ([0.5, 0.25, 0.25], 3, [0.5, 0.25, 0.25]),
    ],
)
def test_other_numbers_of_tiers(policy, num_tiers, probs):
    np.testing.assert_allclose(policy_probs(policy, num_tiers), probs, atol=1e-15)


@given(st.sampled_from(sorted(STATIC_POLICIES)), st.integers(1, 40))
def test_every_policy_is_a_distribution(policy, num_tiers):
    probs = policy_probs(policy, num_tiers)
    assert probs.shape == (num_tiers,)
    assert probs.min() >= 0
    assert probs.sum() == pytest.approx(1, abs=1e-12)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 4))
def test_resampling_keeps_shares_and_undoes_splitting(share, num_tiers, split):
    assert resample(share, num_tiers).sum() == pytest.approx(sum(share), abs=1e-9)
    finer = resample(share, split * len(share))
    np.testing.assert_allclose(finer, np.repeat(share, split) / split, atol=1e-9)
    np.testing.assert_allclose(resample(finer, len(share)), share, atol=1e-9)


@pytest.mark.parametrize(
    ("policy", "num_tiers", "message"),
    [
        ("quick", 5, "policy must be one of vanilla, slow, .*, got 'quick'"),
        ("uniform", 0, "num_tiers must be at least 1"),
        ("vanilla", 5, "num_tiers must be 1 for policy 'vanilla'"),
        ([0.5, 0.5], 3, "policy must have num_tiers=3 entries"),
        ([[0.5, 0.5]], 2, "policy must have num_tiers=2 entries"),
        ([0.5, 0.4], 2, "policy must sum to 1, not 0.9"),
        ([1.5, -0.5], 2, "policy must hold finite figures that are not negative"),
        ([float("nan"), 1.0], 2, "policy must hold finite .*: pass chances of at least 0"),
        ([float("inf"), 1.0], 2, "policy must hold finite figures"),
    ],
)
def test_bad_policies_are_refused(policy, num_tiers, message):
    with pytest.raises(ValueError, match=message):
        policy_probs(policy, num_tiers)


def test_the_draw_follows_the_chances_of_the_eligible():
    rng, probs, eligible = np.random.default_rng(3), [0.5, 0.2, 0.1, 0.2], [True, False, True, True]
    count = np.bincount([draw_tier(probs, eligible, rng) for _ in range(8000)], minlength=4) / 8000
    # five standard deviations of a share near 0.5 are 0.028
    np.testing.assert_allclose(count, np.array([0.5, 0, 0.1, 0.2]) / 0.8, atol=0.028)
    assert count[1] == 0


def test_eligible_tiers_without_a_chance_are_drawn_alike():
    rng = np.random.default_rng(0)
    drawn = [draw_tier([1.0, 0.0, 0.0], [False, True, True], rng) for _ in range(2000)]
    assert set(drawn) == {1, 2}
    assert np.mean(drawn) == pytest.approx(1.5, abs=0.056)  # five standard deviations


def test_each_draw_takes_one_number_from_the_generator():
    rng, twin = np.random.default_rng(5), np.random.default_rng(5)
    draw_tier([0.2] * 5, [True] * 5, rng)
    twin.random()
    assert rng.random() == twin.random()


def test_nobody_eligible_is_an_error_and_not_a_loop():
    with pytest.raises(ValueError, match="eligible must hold at least one true"):
        draw_tier([0.5, 0.5], [False, False], np.random.default_rng(0))
