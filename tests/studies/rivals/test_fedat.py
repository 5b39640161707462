"""Tiers side by side on the virtual clock, by hand, and by what the paper says of its weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadratics import STEPS, Watched, fedavg, models
from recording import History

from flwr_hetero_studies.rivals import FedAT
from flwr_hetero_studies.rivals.fedat import mirrored_weights


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_weights_are_the_papers(counts):
    weights = mirrored_weights(counts)
    total = sum(counts)
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
