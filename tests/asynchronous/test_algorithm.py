import numpy as np
import pytest

from flwr_hetero.asynchronous.algorithm import (
    draw_nodes,
    mean_weight,
    update_weights,
)


def test_nodes_are_drawn_uniformly_where_there_is_no_room_for_all():
    rng = np.random.default_rng(0)
    drawn = np.ravel([draw_nodes([3, 4, 5, 6], 2, rng) for _ in range(2000)])
    assert np.bincount(drawn)[3:] / 2000 == pytest.approx([0.5] * 4, abs=0.04)
    assert draw_nodes([3, 4], 0, rng) == []


def test_nodes_count_by_their_weight_whatever_their_pace():
    weight = np.array([1.0, 2.0, 4.0])
    interval_s = np.array([1.0, 2.0, 8.0])
    arrivals = sorted((t, i) for i, s in enumerate(interval_s) for t in np.arange(s, 8000.0, s))
    total = np.zeros(3)
    steps = []
    every = weight * interval_s
    for start in range(0, len(arrivals) - 3, 4):
        nodes = [node for _, node in arrivals[start : start + 4]]
        mean = mean_weight(every, 1 / interval_s)
        weights, step, _ = update_weights(every[nodes], mean)
        steps.append(step)
        np.add.at(total, nodes, step * weights / weights.sum())
    np.testing.assert_allclose(total / total.sum(), weight / weight.sum(), rtol=0.01)
    assert np.mean(steps) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("weights", "every", "expected", "step", "clipped_share"),
    [
        ([1.0, 1.0, 1.0, 97.0], None, [1, 1, 1, 50], 1.0, 47 / 100),
        ([97.0], [1.0, 1.0, 1.0, 97.0], [50], 50 / (53 / 4), 47 / 97),
        ([0.0, 0.0], None, [1, 1], 1.0, 0.0),  # all alike
        ([0.0, 0.0], [0.0, 5.0], [0, 0], 0.0, 0.0),
    ],
)
def test_weights_are_clipped_and_it_is_said(weights, every, expected, step, clipped_share):
    every = weights if every is None else every
    mean = mean_weight(every, [1.0] * len(every), 50.0)
    found = update_weights(weights, mean, most=50.0)
    np.testing.assert_allclose(found[0], expected)
    assert found[1:] == pytest.approx((step, clipped_share))
