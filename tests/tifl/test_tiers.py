import json

import numpy as np
import pytest
from flwr.app import MetricRecord

from flwr_hetero.tifl.algorithm import TierState
from flwr_hetero.tifl.tiers import Tiers, accuracy_of, accuracy_per_tier, draw_nodes

NAMES = [f"node-{i}" for i in range(9)]


def make_tiers():
    """Three tiers of three nodes, and a dropout."""
    latency = {name: float(i + 1) for i, name in enumerate(NAMES)}
    tier = {name: i // 3 for i, name in enumerate(NAMES)}
    return Tiers(latency | {"node-9": 99.0}, tier, np.array([3.5, 6.5]))


def online(*partitions):
    return lambda name: int(name[5:]) if int(name[5:]) in partitions else None


def state_of(*probs):
    return TierState.first(np.array(probs), np.array([2.0] * 3))


def draw(available, count=2, *, borrow=False, state=None, seed=0):
    rng = np.random.default_rng(seed)
    return draw_nodes(make_tiers(), state or state_of(0, 0, 1), available, count, borrow, rng)


def test_late_joiner_is_placed_by_the_boundaries():
    tiers = make_tiers()
    assert [tiers.add(f"node-{20 + i}", s) for i, s in enumerate((0.1, 3.5, 3.6, 50))] == [
        0,
        0,
        1,
        2,
    ]
    assert tiers.members[2] == [*NAMES[6:], "node-23"]
    assert tiers.latency["node-22"] == 3.6


def test_tiers_are_restored_from_their_info():
    tiers = make_tiers()
    again = Tiers.from_json(json.dumps(tiers.info()))
    assert again.info() == tiers.info()
    assert again.members == tiers.members
    assert tiers.info()["dropouts"] == ["node-9"]


@pytest.mark.parametrize(("there", "count"), [((3, 4, 5), 2), ((3, 5), 2), ((4,), 2), ((), 2)])
def test_sample_takes_available_nodes(there, count):
    drawn = {
        tuple(sorted(make_tiers().sample(1, count, online(*there), np.random.default_rng(seed))))
        for seed in range(40)
    }
    assert {node for nodes in drawn for node in nodes} == set(there)
    assert {len(nodes) for nodes in drawn} == {min(count, len(there))}
    assert all(len(set(nodes)) == len(nodes) for nodes in drawn)


def test_sample_is_uniform_whichever_nodes_are_away():
    latency = dict.fromkeys((f"node-{i}" for i in range(40)), 1.0)
    tiers, rng = Tiers(latency, dict.fromkeys(latency, 0), np.zeros(0)), np.random.default_rng(1)
    available = online(*range(0, 40, 4))
    drawn = [tiers.sample(0, 3, available, rng) for _ in range(2000)]
    assert all(len(set(nodes)) == 3 for nodes in drawn)
    counts = np.bincount(np.ravel(drawn), minlength=40)[::4] / 2000
    assert counts == pytest.approx([0.3] * 10, abs=0.052)  # five standard deviations


def test_sample_each_takes_some_of_every_tier():
    nodes = make_tiers().sample_each(2, online(0, 1, 2, 4, 6, 7), np.random.default_rng(0))
    assert [node // 3 for node in nodes] == [0, 0, 1, 2, 2]


def test_draw_nodes_takes_nodes_of_the_tier():
    drawn, after = draw(online(*range(9)))
    assert drawn.tier == 2
    assert {node // 3 for node in drawn.nodes} == {2}
    assert drawn.probs.tolist() == [0, 0, 1]
    assert after.credits.tolist() == [2, 2, 1]


@pytest.mark.parametrize(("borrow", "sizes"), [(False, [1]), (True, [1, 0, 1])])
def test_small_tier_shrinks_or_borrows(borrow, sizes):
    drawn, after = draw(online(1, 8), borrow=borrow)
    assert [sum(node // 3 == t for node in drawn.nodes) for t in (2, 1, 0)][: len(sizes)] == sizes
    assert len(drawn.nodes) == sum(sizes)
    assert after.credits.tolist() == [2, 2, 1]


def test_tier_without_nodes_is_passed_and_pays_nothing():
    drawn, after = draw(online(0, 1))
    assert drawn.tier == 0
    assert after.credits.tolist() == [1, 2, 2]


def test_no_node_leaves_the_state():
    state = state_of(0, 0, 1)
    drawn, after = draw(online(), state=state)
    assert (drawn.tier, drawn.nodes, drawn.probs.tolist()) == (None, [], [0, 0, 0])
    assert after is state


# --- accuracy --------------------------------------------------------------------------


def test_accuracy_is_weighted_by_examples():
    reported = {
        "node-0": MetricRecord({"acc": 0.5, "n": 30}),
        "node-1": MetricRecord({"acc": 0.9, "n": 10}),
        "node-8": MetricRecord({"acc": 0.2, "n": 10}),
        "node-9": MetricRecord({"acc": 1.0, "n": 10}),  # a dropout
    }
    accuracy = accuracy_per_tier(reported, make_tiers(), None, "n")
    np.testing.assert_allclose(accuracy, [0.6, np.nan, 0.2])


def test_missing_accuracy_is_logged(caplog):
    reported = {"node-0": MetricRecord({"f1": 0.5, "n": 30})}
    accuracy = accuracy_per_tier(reported, make_tiers(), None, "n")
    assert np.isnan(accuracy).all()
    assert "set accuracy_key to one of ['f1', 'n']" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "key", "expected"),
    [
        ({"loss": 2.0, "eval-Acc": 0.5}, None, 0.5),
        ({"eval-loss": 2.0}, None, -2.0),
        ({"f1": 0.3, "acc": 0.5}, "f1", 0.3),
        ({"acc": 0.5}, "f1", np.nan),
        ({"f1": 0.3}, None, np.nan),
        ({"acc": float("inf")}, None, np.nan),
    ],
)
def test_accuracy_of(metrics, key, expected):
    assert accuracy_of(MetricRecord(metrics), key) == pytest.approx(expected, nan_ok=True)
