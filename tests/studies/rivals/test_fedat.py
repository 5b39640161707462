"""Tiers side by side on the virtual clock, by hand, and by what the paper says of its weights."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadratics import STEPS, Watched, answers, fedavg, models
from recording import History

from flwr_hetero.fleet import Fault
from flwr_hetero_studies.rivals import FedAT
from flwr_hetero_studies.rivals.fedat import mirrored_weights

SPEEDS = [s * (1 + 0.01 * i) for s in (4.0, 2.0, 1.0) for i in range(3)]  # three tiers


def run(merges, strategy=None, speeds=SPEEDS, make=Watched, timeout=600.0, **settings):
    """Run two of three nodes a tier; return the merges' records and the grid."""
    history = History(strategy or FedAT(fedavg(), 2, 3))
    grid = make([1.0] * len(speeds), speeds, lr=0.01, **settings)
    models(history, grid, merges, timeout=timeout)
    return [record | record["fedbuff"] for record in history.records[1:]], grid


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_weights_are_the_papers(counts):
    weights, total = mirrored_weights(counts), sum(counts)
    assert weights == pytest.approx(
        [counts[len(counts) - 1 - m] / total for m in range(len(counts))]
    )
    assert weights.sum() == pytest.approx(1.0)
    ordered = mirrored_weights(sorted(counts, reverse=True))
    assert (np.diff(ordered) >= 0).all()  # the slower a tier, the more it counts


def test_two_tiers_by_hand():
    """Node 0 answers after 10, 20, 30 s, node 1 after 25 s."""
    grid = Watched([1.0, 0.0], [1.0, 0.4], lr=0.5)
    history = History(FedAT(fedavg(), 1, 2))
    found, _ = models(history, grid, 4, x=0.5)

    def near(x, goal):
        return goal + 0.5**STEPS * (x - goal)

    first = near(0.5, 1.0)
    second = near(first, 1.0)
    third = 1 / 3 * second + 2 / 3 * near(0.5, 0.0)  # tier 0 merged twice, tier 1 once
    fourth = 1 / 4 * near(second, 1.0) + 3 / 4 * near(0.5, 0.0)
    assert found == pytest.approx([0.5, first, second, third, fourth])
    assert [record["virtual_s"] for record in history.records] == pytest.approx([0, 10, 20, 25, 30])
    assert [record["fedbuff"]["tier"] for record in history.records[1:]] == [0, 0, 1, 0]
    assert history.inner.tier == {"node-0": 0, "node-1": 1}


def test_each_tier_updates_at_its_own_pace():
    records, grid = run(120, strategy := FedAT(fedavg(), 2, 3))
    assert sorted(node for at_s, node, _, _ in grid.sent if not at_s) == list(range(9))
    counts = Counter(record["tier"] for record in records)
    assert [counts[tier] / counts[2] for tier in (0, 1)] == pytest.approx([4, 2], rel=0.1)
    for tier, speed in enumerate((4.0, 2.0, 1.0)):  # the slower of two nodes, 1 or 2 % faster
        times = [record["virtual_s"] for record in records[10:] if record["tier"] == tier]
        assert np.diff(times) == pytest.approx(STEPS / speed, rel=0.02)
    for record in records:
        assert {int(node[-1]) // 3 for node in record["selected"]} == {record["tier"]}
    assert {len(record["selected"]) for record in records[10:]} == {2}
    assert strategy.tier == {f"node-{i}": i // 3 for i in range(9)}


def test_dead_node_costs_its_tier_the_time_out_and_the_others_nothing():
    class Dies(Watched):
        def push_messages(self, messages):
            never = [i for i, each in self.pending.items() if not answers(each.reply)]
            self.at_work = {i: n for i, n in self.at_work.items() if i not in never}
            return super().push_messages(messages)

    dies = [Fault(1, "dies", first_round=20, last_round=45)]
    records, _ = run(120, make=Dies, faults=dies, timeout=40.0)
    failed = [record for record in records if record["failures"]]
    assert {f["node"] for record in failed for f in record["failures"]} == {"node-1"}
    assert len(failed[0]["nodes"]) == 1
    for tier, speed in ((1, 2.0), (2, 1.0)):
        times = [record["virtual_s"] for record in records[20:] if record["tier"] == tier]
        assert np.diff(times) == pytest.approx(STEPS / speed, rel=0.02)
