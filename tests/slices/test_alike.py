"""Nodes that are alike and all at work: their replies are taken together."""

import numpy as np
import pytest
from quadratics import app, fedavg, models
from recording import History

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedSlice

NODES = 8


def train(speeds, in_flight=None, num_rounds=4, jitter=0.05):
    client_app = app(1 + np.arange(len(speeds)), [40] * len(speeds), 0.05)
    cost = {"seconds_per_example": 0.05, "wait_s": 0.2, "jitter": jitter}
    grid = LocalGrid(client_app, [DeviceProfile(s, **cost) for s in speeds])
    strategy = History(FedSlice(fedavg(), concurrency=in_flight))
    models(strategy, grid, num_rounds)
    return strategy.rule, strategy.records[1:]


def updates_at_once(records):
    """Return the updates in a server update, the first round left out, in which nodes are timed."""
    facts = [(len(r["fedbuff"]["nodes"]), r["fedslice"]["updates"]) for r in records[1:]]
    return sum(nodes for nodes, _ in facts) / sum(count for _, count in facts)


def test_replies_of_alike_nodes_are_taken_together():
    rule, records = train([1.0] * NODES)
    assert rule.alike
    # a buffer has two; the one or other reply comes too late
    assert updates_at_once(records) > 0.75 * NODES
    assert max(max(record["fedbuff"]["staleness"]) for record in records[2:]) <= 1


@pytest.mark.parametrize(
    ("speeds", "in_flight"),
    [(np.geomspace(1, 2, NODES), None), ([1.0] * NODES, NODES - 1), ([1.0] * 6 + [0.1] * 2, None)],
)
def test_others_fill_a_buffer_as_before(speeds, in_flight):
    rule, records = train(speeds, in_flight)
    assert not rule.alike
    assert updates_at_once(records) == 2


def test_a_node_that_is_late_is_waited_for_no_longer_than_a_slice():
    # where nine tenths are alike, one may be as slow as it likes
    rule, records = train([1.0] * 20 + [0.02], jitter=0.0)
    assert rule.alike
    seconds = np.diff([record["virtual_s"] for record in records])
    # 40 steps of 0.05 s, and messages of 0.2 s; the slow one's job takes 100 s
    assert seconds.max() < 2 * (40 * 0.05 + 3 * 0.2)
