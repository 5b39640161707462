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
