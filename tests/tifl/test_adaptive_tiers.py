"""ChangeProbs, its trigger and credits of TiFL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import change_probs, should_change, start_credits

NAN = float("nan")
ALL = [True] * 5
accuracies = st.lists(st.one_of(st.floats(0, 1), st.just(0.5), st.just(NAN)), min_size=1)


# --- ChangeProbs -------------------------------------------------------------------


def test_rank_of_five_different_accuracies():
    probs = change_probs([0.9, 0.5, 0.7, 0.6, 0.8], ALL)
    np.testing.assert_allclose(probs, np.array([1, 5, 3, 4, 2]) / 15)


def test_ties_share_their_ranks():
    probs = change_probs([0.9, 0.5, 0.5, 0.2], [True] * 4)
    np.testing.assert_allclose(probs, np.array([1, 2.5, 2.5, 4]) / 10)


def test_an_unknown_accuracy_is_in_the_middle_and_never_first():
    probs = change_probs([0.9, NAN, 0.5], [True] * 3)
    np.testing.assert_allclose(probs, np.array([1.5, 2, 2.5]) / 6)
    assert change_probs([NAN, NAN], [True] * 2).tolist() == [0.5, 0.5]


def test_only_eligible_tiers_are_ranked():
    probs = change_probs([0.1, 0.9, 0.2], [False, True, True])
    np.testing.assert_allclose(probs, [0, 1 / 3, 2 / 3])
    assert change_probs([0.1, 0.9], [False, True]).tolist() == [0, 1]


def test_exponent_presses_harder():
    np.testing.assert_allclose(change_probs([0.9, 0.5], [True] * 2, exponent=2), [0.2, 0.8])
    assert change_probs([0.9, 0.5], [True] * 2, exponent=0).tolist() == [0.5, 0.5]


def test_deficit_is_one_minus_accuracy():
    np.testing.assert_allclose(change_probs([0.9, 0.7], [True] * 2, "deficit"), [0.25, 0.75])
    # unknown: the mean of the known deficits 0.1 and 0.3
    probs = change_probs([0.9, NAN, 0.7], [True] * 3, "deficit")
    np.testing.assert_allclose(probs, np.array([1, 2, 3]) / 6)
    assert change_probs([1.0, 1.0], [True] * 2, "deficit").tolist() == [0.5, 0.5]
    assert change_probs([NAN, NAN], [True] * 2, "deficit").tolist() == [0.5, 0.5]


def test_a_function_can_be_the_rule():
    probs = change_probs([0.9, 0.5, 0.1], [True, False, True], rule=lambda accuracy: accuracy)
    np.testing.assert_allclose(probs, [0.9, 0, 0.1])


def naive_rank(accuracy):
    """The sentence of the design: m less those lower, less half of the others tied."""
    m = len(accuracy)
    weights = []
    for mine in accuracy:
        lower = sum(other < mine for other in accuracy)
        higher = sum(other > mine for other in accuracy)
        tied_others = m - 1 - lower - higher
        weights.append(m - lower - tied_others / 2)
    return np.array(weights) / (m * (m + 1) / 2)


@given(accuracies)
def test_rank_equals_its_naive_twin(accuracy):
    probs = change_probs(accuracy, [True] * len(accuracy))
    np.testing.assert_allclose(probs, naive_rank(accuracy))


@given(accuracies, st.randoms(use_true_random=False), st.floats(0, 3))
def test_lower_accuracy_never_means_a_lower_chance(accuracy, random, exponent):
    eligible = [random.random() < 0.7 for _ in accuracy]
    eligible[0] = True
    probs = change_probs(accuracy, eligible, exponent=exponent)
    assert probs.sum() == pytest.approx(1)
    assert not probs[~np.array(eligible)].any()
    m = sum(eligible)
    for j, mine in enumerate(accuracy):
        if eligible[j] and exponent <= 1:
            assert probs[j] >= 2 / (m * (m + 1)) - 1e-12  # nobody starves
        for k, other in enumerate(accuracy):
            if eligible[j] and eligible[k] and mine < other:
                assert probs[j] >= probs[k]


def test_rank_does_not_depend_on_the_scale():
    losses = np.array([0.3, 2.5, 1.1])
    assert np.array_equal(
        change_probs(-losses, [True] * 3), change_probs(1 - losses / 10, [True] * 3)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5], [False, False]), "eligible must hold one flag per tier, at least one true"),
        (([0.5, 0.5], [True]), "eligible must hold one flag per tier"),
        (([0.5], [True], "softmax"), "rule must be 'rank', 'deficit' or a function, got 'softmax'"),
        (([0.5], [True], "rank", -1), "exponent must be finite and not negative, got -1"),
        (([0.5], [True], "rank", NAN), "exponent must be finite"),
        (([1.5], [True], "deficit"), "one finite weight >= 0 per tier"),
        (([0.5], [True], lambda accuracy: [1.0, 2.0]), "one finite weight >= 0 per tier"),
        (([0.5], [True], lambda accuracy: [NAN]), "one finite weight >= 0 per tier"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        change_probs(*arguments)


@pytest.mark.parametrize(
    ("current", "previous", "change"),
    [
        (0.5, 0.6, True),
        (0.5, 0.5, True),
        (0.6, 0.5, False),
        (NAN, 0.5, False),
        (0.5, NAN, False),
    ],
)
def test_the_trigger_is_no_improvement(current, previous, change):
    assert should_change(current, previous) is change


# --- credits -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("credits", "expected"),
    [
        (None, [np.inf] * 3),
        (4, [4, 4, 4]),
        ([7, 2, 0], [7, 2, 0]),
        ((7, 2, 0), [7, 2, 0]),
        ("equal", [4, 4, 4]),
        ("geometric", [6, 3, 2]),
        ("paced", [4, 2, 1]),
    ],
)
def test_credits_in_every_form(credits, expected):
    assert start_credits(credits, num_tiers=3, num_rounds=10).tolist() == expected


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        ([0.25, 0.5, 1, 2, 10], [16, 8, 4, 2, 1]),  # TiFL's CPU shares
        ([3.0] * 5, [1] * 5),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1] * 5),
        ([1, 2, 2, 3, 4], [3, 2, 2, 1, 1]),
        ([1e-6, 1, 1, 1, 1], [16, 1, 1, 1, 1]),
        ([0, 1, 1, 1, 1], [16, 1, 1, 1, 1]),  # a clock too coarse
        ([0] * 5, [1] * 5),
    ],
)
def test_paced_credits_are_what_speed_earns_up_to_a_doubling(latency, expected):
    assert start_credits("paced", 5, 100, latency).tolist() == expected


@pytest.mark.parametrize("latency", [[1.0, 2.0], [1.0, -0.1, 2.0], [1.0, NAN, 2.0]])
def test_paced_credits_want_a_latency_per_tier(latency):
    with pytest.raises(ValueError, match="latency must be finite and at least 0, one per tier"):
        start_credits("paced", 3, 10, latency)


@given(st.sampled_from(["equal", "geometric"]), st.integers(1, 20), st.integers(1, 5000))
def test_named_credits_last_for_the_run_and_favour_the_fast(credits, num_tiers, num_rounds):
    figures = start_credits(credits, num_tiers, num_rounds)
    assert num_rounds <= figures.sum() < num_rounds + num_tiers
    assert (np.diff(figures) <= 0).all()
    assert figures.min() >= 1


@pytest.mark.parametrize(
    ("credits", "message"),
    [
        (-1, "credits must be whole numbers >= 0, not all 0, got -1"),
        ([3, -1, 2], "credits must be whole numbers >= 0"),
        (0, "credits must be whole numbers >= 0, not all 0"),
        ([0, 0, 0], "not all 0"),
        (1.5, "credits must be whole numbers"),
        ([1, 2, NAN], "credits must be whole numbers"),
        ([1, 2], "credits must have num_tiers=3 entries"),
        ("linear", "credits must be equal, geometric or paced if a text, got 'linear'"),
    ],
)
def test_bad_credits_are_refused(credits, message):
    with pytest.raises(ValueError, match=message):
        start_credits(credits, num_tiers=3, num_rounds=10)


@pytest.mark.parametrize(("name", "value"), [("num_tiers", 0), ("num_rounds", 0)])
def test_bad_sizes_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        start_credits("equal", **{"num_tiers": 3, "num_rounds": 10, name: value})
