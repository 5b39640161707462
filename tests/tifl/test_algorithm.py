import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.tifl.algorithm import (
    LEAST_ERROR,
    TierState,
    carry_over,
    change_probs,
    draw_nodes,
    first_state,
    paced_credits,
    policy_probs,
    refund,
    select,
    steer,
    weigh_tiers,
)

NAN, INF = float("nan"), float("inf")
MEMBERS = [["node-0", "node-1", "node-2"], ["node-3", "node-4", "node-5"], ["node-6"]]


def state_of(probs, credits=None, full_credits=None, accuracy=None, tier=-1):
    full = np.array(full_credits or [INF] * len(probs), float)
    own = full if credits is None else np.array(credits, float)
    known = np.array(accuracy or [NAN] * len(probs))
    return TierState(np.array(probs, float), known, own, full, tier)


def online(*partitions):
    return lambda name: int(name[5:]) if int(name[5:]) in partitions else None


def one_round(state, there=range(7), seed=0, accuracy=None):
    return select(state, accuracy, MEMBERS, online(*there), 2, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("policy", "num_tiers", "probs"),
    [
        ("random", 5, [0.7, 0.1, 0.1, 0.05, 0.05]),  # five tiers: the paper's Table 1
        ("fast1", 5, [0.225, 0.225, 0.225, 0.225, 0.1]),
        ("fast2", 5, [0.2375, 0.2375, 0.2375, 0.2375, 0.05]),
        ("fast3", 5, [0.25, 0.25, 0.25, 0.25, 0]),
        ("slow", 3, [0, 0, 1]),
        ("fast", 3, [1, 0, 0]),
        ("uniform", 4, [0.25] * 4),
        ("fast1", 2, [0.9, 0.1]),
        ("fast2", 3, [0.475, 0.475, 0.05]),
        ("fast3", 3, [0.5, 0.5, 0]),
        ("random", 10, [0.35, 0.35, 0.05, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025]),
        ("vanilla", 1, [1]),
        ([0.5, 0.25, 0.25], 3, [0.5, 0.25, 0.25]),
    ],
)
def test_policy_probs_by_hand(policy, num_tiers, probs):
    np.testing.assert_allclose(policy_probs(policy, num_tiers), probs, atol=1e-15)


@pytest.mark.parametrize(
    ("credits", "num_tiers", "count", "expected"),
    [
        (None, 2, 2, [INF, INF]),
        ([4, 4], 2, 2, [4, 4]),
        ([3, 2, 1], 3, 3, [3, 2, 1]),
        ([4, 3, 2, 1], 4, 2, [7, 3]),  # resampled
    ],
)
def test_first_state_by_hand(credits, num_tiers, count, expected):
    state = first_state("uniform", num_tiers, credits, count)
    assert state.credits.tolist() == state.full_credits.tolist() == expected
    assert state.probs == pytest.approx(1 / count)
    assert np.isnan(state.accuracy).all()


@pytest.mark.parametrize(("policy", "probs"), [("algorithm-2", [0.3, 0.7]), ("slow", [0, 1])])
def test_new_tiers_go_on_with_what_was_known(policy, probs):
    before = state_of([0.3, 0.7], [4, 5], [9, 9], accuracy=[0.8, 0.6], tier=1)
    new = first_state(policy, 2, [9, 9], 2)
    after = carry_over(before, new, policy, with_credits=True)
    assert (after.probs.tolist(), after.accuracy.tolist()) == (probs, [0.8, 0.6])
    assert (after.credits.tolist(), after.tier) == ([4, 5], 1)
    assert carry_over(before, new, policy, with_credits=False).credits.tolist() == [9, 9]


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


@pytest.mark.parametrize(
    ("now", "before", "changes"),
    [(0.5, 0.6, True), (0.5, 0.5, True), (0.6, 0.5, False), (NAN, 0.5, False), (0.5, NAN, False)],
)
def test_probs_change_only_without_improvement(now, before, changes):
    state = state_of([0.5, 0.25, 0.25], accuracy=[0.1, before, 0.3], tier=1)
    accuracy = np.array([0.9, now, 0.2])
    draw, after = one_round(state, accuracy=accuracy)
    assert (after.probs.tolist() != [0.5, 0.25, 0.25]) == changes
    np.testing.assert_array_equal(draw.probs, after.probs)  # the new ones are drawn by
    np.testing.assert_array_equal(after.accuracy, [0.9, before if np.isnan(now) else now, 0.2])
    _, first = one_round(state._replace(tier=-1), accuracy=accuracy)
    assert first.probs.tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("credits", "there", "eligible", "after"),
    [
        ([2, 2, 2], range(7), [1, 1, 1], [2, 2, 2]),
        ([0, 2, 2], range(7), [0, 1, 1], [0, 2, 2]),
        ([0, 0, 0], range(7), [1, 1, 1], [5, 4, 3]),  # refilled
        ([2, 0, 2], range(3, 7), [0, 0, 1], [2, 0, 2]),  # tiers without nodes pay nothing
        ([2, 0, 0], range(3, 7), [0, 1, 1], [7, 4, 3]),  # those with credits have no nodes
    ],
)
def test_a_round_spends_one_credit(credits, there, eligible, after):
    state = state_of([0.2, 0.3, 0.5], credits, full_credits=[5, 4, 3])
    for seed in range(8):  # whichever tiers are tried before
        draw, new = one_round(state, there, seed=seed)
        left = np.array(after)
        left[draw.tier] -= 1
        assert eligible[draw.tier]
        assert new.credits.tolist() == left.tolist()
        assert (new.tier, state.credits.tolist()) == (draw.tier, credits)
        assert refund(new).credits.tolist() == after
        assert len(draw.nodes) == min(2, len(MEMBERS[draw.tier]))
        assert draw.probs.sum() == pytest.approx(1)


def test_tiers_without_a_node_are_passed():
    state = state_of([0.2, 0.3, 0.5], [0, 0, 0], [1, 1, 1])
    draw, after = one_round(state, there=())
    assert (draw.tier, draw.nodes, draw.probs.tolist()) == (None, [], [0, 0, 0])
    assert after is state
    draw, _ = one_round(state_of([1.0, 0.0, 0.0]), there=(6,))  # "fast": uniform over the others
    assert (draw.tier, draw.nodes) == (2, [6])
    members = [[], ["node-3"], []]
    how = (online(3), 1, np.random.default_rng(0))
    draw, _ = select(state_of([0.9, 0.0, 0.1]), None, members, *how)
    assert (draw.tier, draw.probs.tolist()) == (1, [0, 1, 0])


def test_tiers_are_drawn_by_their_probabilities():
    state = state_of([0.4, 0.2, 0.1, 0.3], [3, 0, 1, 2])
    names = [["a"], ["b"], ["c"], ["d"]]
    rng = np.random.default_rng(3)
    nodes = dict(zip("abcd", range(4), strict=True))
    how = (None, names, nodes.get, 1, rng)
    drawn = [select(state, *how)[0].tier for _ in range(4000)]
    # five standard deviations of a share of 0.5 are 0.04
    assert np.bincount(drawn) / 4000 == pytest.approx([0.5, 0, 0.125, 0.375], abs=0.04)
    weights = np.array([0.0, 9.0, 1.0, 1.0])  # of tier 1 without credits
    drawn = [select(state, *how, weights)[0].tier for _ in range(2000)]
    assert np.bincount(drawn) / 2000 == pytest.approx([0, 0, 0.5, 0.5], abs=0.056)


def test_nodes_are_drawn_uniformly_whichever_are_away():
    names = [f"node-{i}" for i in range(40)]
    rng = np.random.default_rng(1)
    drawn = [draw_nodes(names, 3, online(*range(0, 40, 4)), rng) for _ in range(2000)]
    counts = np.bincount(np.ravel(drawn), minlength=40)[::4] / 2000
    assert counts == pytest.approx([0.3] * 10, abs=0.052)  # five standard deviations


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
    latency = np.array([0.25, 0.5, 1.0, 2.0, 10.0])
    before = weigh_tiers(np.array(accuracy), latency)
    for tier in range(5):
        lower = np.array(accuracy)
        lower[tier] /= 2
        after = weigh_tiers(lower, latency)
        assert after[tier] >= before[tier] * (1 - 1e-9)
        assert after.min() >= LEAST_ERROR**2 * 40**-0.75 / 5
        assert after.sum() == pytest.approx(1)


def test_steer_averages_and_keeps_what_is_known():
    state = state_of([1 / 3] * 3)
    for accuracy in ([0.8, NAN, 0.4], [0.6, 0.5, NAN]):
        state = steer(state, np.array(accuracy), np.ones(3), np.ones(3))
    np.testing.assert_allclose(state.accuracy, [0.7, 0.5, 0.4])
    np.testing.assert_allclose(state.probs, np.array([9, 25, 36]) / 70)
    same = steer(state, None, np.array([1.0, 1.0, 16.0]), np.ones(3))  # tiers were formed again
    np.testing.assert_allclose(same.accuracy, state.accuracy)
    np.testing.assert_allclose(same.probs, np.array([9, 25, 36 / 8]) / 38.5)
