"""Selections that leave slow nodes out, on nodes that need 1, 0.5, 0.25, 0.2 and 0.125 s."""

import numpy as np
import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import DeadlineSelection, WithoutSlowest

SPEEDS = [1, 2, 4, 5, 8]


@pytest.mark.parametrize(
    ("rival", "settings", "slow", "round_s"),
    [
        (DeadlineSelection, {"deadline_s": 0.3}, [0, 1], 0.25),
        # The default deadline is one that four of five nodes meet.
        (DeadlineSelection, {}, [0], 0.5),
        (WithoutSlowest, {"left_out": 0.0}, [], 1.0),
        (WithoutSlowest, {"left_out": 0.2}, [0], 0.5),
        (WithoutSlowest, {"left_out": 0.6}, [0, 1, 2], 0.2),
    ],
)
def test_the_slowest_never_train(rival, settings, slow, round_s):
    history = History(rival(fedavg(), **settings))
    grid = LocalGrid(toy_app(), [DeviceProfile(speed) for speed in SPEEDS])
    history.start(grid, toy_arrays(), 4, timeout=20.0)
    records = history.records[1:]
    times = [record["virtual_s"] for record in records]
    # Before round 1, one node is timed alone and then all are.
    assert times[0] == pytest.approx(1 + 1 + round_s)
    assert np.diff(times) == pytest.approx([round_s] * 3)
    for record in records:
        assert sorted(record["selected"]) == [f"node-{i}" for i in range(5) if i not in slow]
        assert record[rival.name]["left_out"] == [f"node-{i}" for i in slow]
