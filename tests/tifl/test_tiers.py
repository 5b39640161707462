import json

import numpy as np
import pytest

from flwr_hetero.tifl.algorithm import TierState
from flwr_hetero.tifl.tiers import Tiers, draw_nodes

NAMES = [f"node-{i}" for i in range(9)]


def make_tiers():
    """Three tiers of three nodes, and a dropout."""
    latency = {name: float(i + 1) for i, name in enumerate(NAMES)}
    tier = {name: i // 3 for i, name in enumerate(NAMES)}
    return Tiers(latency | {"node-9": 99.0}, tier, np.array([3.5, 6.5]))


def online(*partitions):
    return lambda name: int(name[5:]) if int(name[5:]) in partitions else None


def test_late_joiner_is_placed_by_the_boundaries():
    tiers = make_tiers()
    placed = [tiers.add(f"node-{20 + i}", s) for i, s in enumerate((0.1, 3.5, 3.6, 50))]
    assert placed == [0, 0, 1, 2]
    assert tiers.members[2] == [*NAMES[6:], "node-23"]
    assert tiers.latency["node-22"] == 3.6


def test_tiers_are_restored_from_their_info():
    tiers = make_tiers()
    again = Tiers.from_json(json.dumps(tiers.info()))
    assert again.info() == tiers.info()
    assert again.members == tiers.members
    assert tiers.info()["dropouts"] == ["node-9"]


@pytest.mark.parametrize("there", [(3, 4, 5), (3, 5), (4,), ()])
def test_sample_takes_available_nodes(there):
    rng = np.random.default_rng(0)
    drawn = [make_tiers().sample(1, 2, online(*there), rng) for _ in range(40)]
    assert {node for nodes in drawn for node in nodes} == set(there)
    assert {len(nodes) for nodes in drawn} == {len(set(nodes)) for nodes in drawn}
    assert {len(nodes) for nodes in drawn} == {min(2, len(there))}


def test_sample_is_uniform_whichever_nodes_are_away():
    latency = dict.fromkeys((f"node-{i}" for i in range(40)), 1.0)
    tiers, rng = Tiers(latency, dict.fromkeys(latency, 0), np.zeros(0)), np.random.default_rng(1)
    available = online(*range(0, 40, 4))
    drawn = [tiers.sample(0, 3, available, rng) for _ in range(2000)]
    assert all(len(set(nodes)) == 3 for nodes in drawn)
    counts = np.bincount(np.ravel(drawn), minlength=40)[::4] / 2000
    assert counts == pytest.approx([0.3] * 10, abs=0.052)  # five standard deviations


def test_panel_takes_the_next_nodes_for_those_away():
    latency = {f"node-{i}": 1.0 for i in range(100)}
    tiers = Tiers(latency, {name: int(name[5:]) // 50 for name in latency}, np.array([1.0]))
    panel = tiers.panel(online(*range(100)))
    assert [node // 50 for node in panel] == [0] * 10 + [1] * 10
    again = tiers.panel(online(*set(range(100)) - set(panel[:3])))
    assert again[10:] == panel[10:]
    assert set(panel[3:10]) < set(again[:10])


@pytest.mark.parametrize(
    ("there", "borrow", "sizes", "tier", "credits"),
    [
        (range(9), False, [0, 0, 2], 2, [2, 2, 1]),
        (range(9), True, [0, 0, 2], 2, [2, 2, 1]),
        ((1, 8), False, [0, 0, 1], 2, [2, 2, 1]),
        ((1, 8), True, [1, 0, 1], 2, [2, 2, 1]),
        ((0, 1), False, [2, 0, 0], 0, [1, 2, 2]),  # tiers without nodes are passed and pay nothing
        ((), True, [0, 0, 0], None, [2, 2, 2]),
    ],
)
def test_draw_nodes(there, borrow, sizes, tier, credits):
    state = TierState.first(np.array([0.0, 0.0, 1.0]), np.array([2.0] * 3), np.ones(3))
    rng = np.random.default_rng(0)
    draw, after = draw_nodes(make_tiers(), state, state.probs, online(*there), 2, borrow, rng)
    assert np.bincount(np.array(draw.nodes, int) // 3, minlength=3).tolist() == sizes
    assert draw.tier == tier
    assert draw.probs.argmax() == (tier or 0)
    assert draw.probs.sum() == (tier is not None)
    assert after.credits.tolist() == credits
