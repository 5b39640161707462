"""Weights that undo how often nodes reply, over a whole run."""

import numpy as np
import pytest

from flwr_hetero.asynchronous.strategy import (
    Conditions,
    MeansOfNodes,
    RateCorrection,
    ReplyMeans,
)

NODES = [str(i) for i in range(8)]


def weigh(rates, nodes, weight=1.0, discounts=None, **conditions):
    discounts = np.ones(len(nodes)) if discounts is None else discounts
    return rates.weigh(nodes, [weight] * len(nodes), discounts, Conditions(**conditions))


def interval_s(means):
    return MeansOfNodes.of([means]).intervals_s(0.0)[0]


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


def test_a_node_counts_the_less_the_more_often_it_replies():
    """Node a replies every 2 s and b every 4 s; both are as stale as they always are."""
    rates = RateCorrection((1.0, 1.0))
    for _ in range(20):
        for node, interval_s in (("a", 2.0), ("b", 4.0)):
            rates.learn(node, 10.0, 0.0, interval_s, discount=0.5)
    found = weigh(rates, ["a", "b"], 10.0, np.array([0.5, 0.25]))
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
    free = weigh(rates, nodes, 10.0)
    assert free.factors[1] / free.factors[0] == pytest.approx(40)
    rates.lengths = dict.fromkeys(intervals_s, 0.3)
    bounded = weigh(rates, nodes, 10.0)
    assert bounded.factors[1] / bounded.factors[0] == pytest.approx(5)
    # a weight of 40 is cut to 5, beside one of 1
    assert (free.bounded_share, bounded.bounded_share) == (0, pytest.approx(35 / 41))
    assert bounded.clipped_share == free.clipped_share == 0
    # all replies of 40 s together move the model by as many mean updates as there are replies
    counts = {node: 40 / interval_s for node, interval_s in intervals_s.items()}
    steps = {node: weigh(rates, [node], 10.0).step for node in intervals_s}
    total = sum(counts[node] * steps[node] for node in intervals_s)
    assert total == pytest.approx(sum(counts.values()))


@pytest.mark.parametrize("start_s", [1.0, 100.0])
def test_a_slow_start_does_not_loosen_the_bound_on_lengths(start_s):
    """The first replies of a simulation take long; what is usual then does not hold for later."""
    rates = RateCorrection((1.0, 1.0))
    rates.lengths = dict.fromkeys(NODES, 1.0)
    now_s = 0.0
    for number in range(40):
        took_s = start_s if number == 0 else 1.0
        for node in NODES:
            rates.learn(node, 1.0, now_s, now_s + took_s, 1.0)
        weigh(rates, NODES)
        now_s += took_s
    rates.lengths["0"] = 10.0
    found = weigh(rates, ["0"])
    # It may move the model by five usual updates: half of its own length.
    assert found.bounded_share == pytest.approx(0.5)


def test_the_time_to_load_the_app_does_not_count():
    """A slow node loads for minutes, and would then weigh many times what it should."""
    rates = RateCorrection((1.0, 1.0))
    for sent_s, arrived_s in ((0.0, 5.0), (5.0, 6.0), (6.0, 7.0)):
        rates.learn("fast", 1.0, sent_s, arrived_s, 1.0, loads=True)
    # A resumed run still knows the longest reply.
    text = rates.to_str()
    rates = RateCorrection((1.0, 1.0))
    rates.load_str(text)
    rates.learn("slow", 1.0, 0.0, 100.0, 1.0, loads=True)
    # Until its second reply it counts as slow as the slowest of the nodes that are known.
    assert weigh(rates, ["fast", "slow"]).factors == pytest.approx([1.0, 1.0])
    rates.learn("slow", 1.0, 100.0, 102.0, 1.0, loads=True)
    assert weigh(rates, ["fast", "slow"]).factors == pytest.approx([1.0, 2.0])
