import numpy as np
import pytest

from flwr_hetero.asynchronous.algorithm import (
    draw_nodes,
    mean_weight,
    update_weights,
    usual_contribution,
    weights_by_length,
)
from flwr_hetero.asynchronous.rates import MeansOfNodes, RateCorrection, ReplyMeans


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


def test_means_are_of_the_last_replies_and_bear_an_absence():
    means = ReplyMeans()
    for number in range(1, 4):
        means.add(10.0 * number, 2.0 * number, None, discount=1 / number)
    assert (means.weight, interval_s(means)) == pytest.approx((20.0, 4.0))
    assert means.discount == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    for _ in range(100):
        means.add(5.0, 1.0, None, 0.5)
    found = means.weight, interval_s(means), means.discount
    assert found == pytest.approx((5, 1, 0.5), rel=0.01)
    means.add(5.0, 1e6, None, 0.5)  # it was away
    assert interval_s(means) == pytest.approx(1.9, rel=0.01)
    at_once = ReplyMeans()
    at_once.add(1.0, 0.0, None, 1.0)
    assert 0 < interval_s(at_once) < 0.01


def interval_s(means):
    return MeansOfNodes.of([means]).intervals_s(0.0)[0]


def test_a_node_counts_the_less_the_more_often_it_replies():
    """Node a replies every 2 s and b every 4 s; both are as stale as they always are."""
    rates = RateCorrection((1.0, 1.0))
    for _ in range(20):
        for node, interval_s in (("a", 2.0), ("b", 4.0)):
            rates.learn(node, 10.0, 0.0, interval_s, discount=0.5)
    found = rates.weigh(["a", "b"], [10.0, 10.0], np.array([0.5, 0.25]))
    assert found.factors[1] == pytest.approx(2 * found.factors[0])
    assert found.scales == pytest.approx([0.5, 0.25])  # half as much: twice as stale as usual
    rates.lengths = {"a": 0.5}
    again = RateCorrection((1.0, 1.0))
    again.load_str(rates.to_str())
    assert (again.means, again.lengths) == (rates.means, rates.lengths)


def test_no_update_moves_the_model_by_more_than_five_usual_ones_and_the_pace_stays():
    """Sixteen nodes reply each second and four every 40 s, whose updates move as far."""
    intervals_s = {f"fast {i}": 1.0 for i in range(16)} | {f"slow {i}": 40.0 for i in range(4)}
    rates = RateCorrection((1.0, 1.0))
    for node, interval_s in intervals_s.items():
        for _ in range(20):
            rates.learn(node, 10.0, 0.0, interval_s, discount=1.0)
    nodes = ["fast 0", "slow 0"]
    ones = np.ones(2)
    free = rates.weigh(nodes, [10.0, 10.0], ones)
    assert free.factors[1] / free.factors[0] == pytest.approx(40)
    rates.lengths = dict.fromkeys(intervals_s, 0.3)
    bounded = rates.weigh(nodes, [10.0, 10.0], ones)
    assert bounded.factors[1] / bounded.factors[0] == pytest.approx(5)
    # a weight of 40 is cut to 5, beside one of 1
    assert (free.bounded_share, bounded.bounded_share) == (0, pytest.approx(35 / 41))
    assert bounded.clipped_share == free.clipped_share == 0
    # all replies of 40 s together move the model by as many mean updates as there are replies
    counts = {node: 40 / interval_s for node, interval_s in intervals_s.items()}
    steps = {node: rates.weigh([node], [10.0], ones[:1]).step for node in intervals_s}
    total = sum(counts[node] * steps[node] for node in intervals_s)
    assert total == pytest.approx(sum(counts.values()))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1.0, 1.0, 1.0], [5.0, 5.0, 5.0]),
        ([1.0, 2.0, 0.5], [10.0, 5.0, 20.0]),  # a long update counts less, a short one more
        ([1.0, 1.0, 0.0], [5.0, 5.0, np.inf]),  # nothing known of the third
        ([0.0, 0.0, 0.0], [np.inf] * 3),
    ],
)
def test_bound_of_a_weight_is_the_smaller_the_longer_the_update(lengths, expected):
    usual = usual_contribution([1.0, 1.0, 8.0], lengths, [9.0, 9.0, 1.0])
    np.testing.assert_allclose(weights_by_length(lengths, usual), expected)
