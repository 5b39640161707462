"""Weights that undo how often nodes reply, over a whole run."""

import numpy as np
import pytest

from flwr_hetero.asynchronous.rates import Conditions, RateCorrection

NODES = [str(i) for i in range(8)]


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
        rates.weigh(NODES, [1.0] * 8, np.ones(8))
        now_s += took_s
    rates.lengths["0"] = 10.0
    found = rates.weigh(["0"], [1.0], np.ones(1))
    # It may move the model by five usual updates: half of its own length.
    assert found.bounded_share == pytest.approx(0.5)


def test_nodes_that_are_asked_in_turn_reply_equally_often():
    """The first reply of a simulation's node may have waited for its worker to start."""
    weighed = {}
    for in_turn in (False, True):
        rates = RateCorrection((1.0, 1.0))
        for node, took_s in zip(NODES, [10.0, 10.0, *[1.0] * 6], strict=True):
            rates.learn(node, 1.0, 0.0, took_s, 1.0)
        conditions = Conditions(in_turn=in_turn)
        weighed[in_turn] = rates.weigh(NODES, [1.0] * 8, np.ones(8), conditions)
    assert weighed[True].step == pytest.approx(1.0)
    assert weighed[True].factors == pytest.approx(np.ones(8))
    assert weighed[False].step > 2


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
    assert factors_of(rates) == pytest.approx([1.0, 1.0])
    rates.learn("slow", 1.0, 100.0, 102.0, 1.0, loads=True)
    assert factors_of(rates) == pytest.approx([1.0, 2.0])


def factors_of(rates):
    return rates.weigh(["fast", "slow"], [1.0, 1.0], np.ones(2)).factors
