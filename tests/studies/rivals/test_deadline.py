import numpy as np
import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import DeadlineSelection

SPEEDS = [1, 2, 4, 5, 8]


def run(rounds=4, speeds=SPEEDS, grid=LocalGrid, faults=(), **settings):
    """Run on nodes that need 1 / speed seconds; return the records."""
    history = History(DeadlineSelection(fedavg(), **settings))
    fleet = grid(toy_app(), [DeviceProfile(speed) for speed in speeds], faults=faults)
    history.start(fleet, toy_arrays(), rounds, timeout=20.0)
    return history.records[1:]


def test_all_that_make_the_deadline_train():
    """Of 1, 0.5, 0.25, 0.2 and 0.125 s three are within 0.3 s: as many as there can be."""
    records = run(deadline_s=0.3)
    times = [record["virtual_s"] for record in records]
    assert times[0] == pytest.approx(1 + 1 + 0.25)  # one is timed, then all
    assert np.diff(times) == pytest.approx([0.25] * 3)
    for record in records:
        assert sorted(record["selected"]) == ["node-2", "node-3", "node-4"]
        assert record["deadline"] == {"deadline_s": 0.3, "left_out": ["node-0", "node-1"]}


def test_default_deadline_is_what_four_of_five_make():
    records = run()
    assert records[0]["deadline"] == {"deadline_s": pytest.approx(0.5), "left_out": ["node-0"]}
    assert [len(record["selected"]) for record in records] == [4] * 4
