"""Who is left out, for how long, and what that costs."""

import numpy as np
import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import WithoutSlowest

SPEEDS = [1, 2, 4, 5, 8]


def run(rounds=4, grid=LocalGrid, **settings):
    """Run on nodes that need 1 / speed seconds; return the records."""
    history = History(WithoutSlowest(fedavg(), **settings))
    fleet = grid(toy_app(), [DeviceProfile(speed) for speed in SPEEDS])
    history.start(fleet, toy_arrays(), rounds, timeout=20.0)
    return history.records[1:]


@pytest.mark.parametrize(
    ("left_out", "slow", "round_s"),
    [(0.0, [], 1.0), (0.2, [0], 0.5), (0.4, [0, 1], 0.25), (0.6, [0, 1, 2], 0.2)],
)
def test_the_slowest_never_train(left_out, slow, round_s):
    """Of 1, 0.5, 0.25, 0.2 and 0.125 s the longest are left out, once all were timed."""
    records = run(left_out=left_out)
    times = [record["virtual_s"] for record in records]
    assert times[0] == pytest.approx(1 + 1 + round_s)  # one is timed, then all
    assert np.diff(times) == pytest.approx([round_s] * 3)
    for record in records:
        assert sorted(record["selected"]) == [f"node-{i}" for i in range(5) if i not in slow]
        assert record["without_slowest"] == {"left_out": [f"node-{i}" for i in slow]}


def test_nodes_are_drawn_uniformly_of_the_others():
    strategy = WithoutSlowest(clients_per_round=2, left_out=0.4)
    strategy.latency_s = {f"id-{i}": 1 / speed for i, speed in enumerate(SPEEDS)}
    drawn = [strategy.select(None, None, set(range(5))) for _ in range(2000)]
    counts = np.bincount(np.ravel(drawn), minlength=5)
    assert counts / 2000 == pytest.approx([0, 0, 2 / 3, 2 / 3, 2 / 3], abs=0.04)
    assert all(len({*nodes}) == 2 for nodes in drawn)


def test_slow_ones_train_where_no_others_are():
    strategy = WithoutSlowest(left_out=0.4)
    strategy.latency_s = {f"id-{i}": 1 / speed for i, speed in enumerate(SPEEDS)}
    assert strategy.select(None, None, {0, 1}) == [0, 1]


def test_the_same_are_left_out_when_times_change():
    class Slower(LocalGrid):
        def push_messages(self, messages):
            if self.virtual_time_s > 3:
                self._nodes[1004].profile = DeviceProfile(0.5)
            return super().push_messages(messages)

    records = run(8, grid=Slower)
    assert {tuple(record["without_slowest"]["left_out"]) for record in records} == {("node-0",)}
    assert "node-4" in records[-1]["selected"]
