"""Emulated devices in a simulation: the order is that of the devices' clock."""

import pytest
from flwr.serverapp import Grid
from quadratics import STEPS, app, fedavg, models
from recording import History

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedBuff

GOALS = [0.0, 1.0, 2.0, 3.0, 4.0]
SPEEDS = [0.31, 1.0, 0.7, 2.3, 0.53]


class InMemoryGrid(Grid):
    """As Flower's simulation: replies come at once, in any order, with their emulated times."""

    def __init__(self, grid):
        self.hidden = grid

    def set_run(self, run):
        self.hidden.set_run(run)

    @property
    def run(self):
        return self.hidden.run

    def create_message(self, *args, **settings):
        return self.hidden.create_message(*args, **settings)

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return set(self.hidden.get_node_ids())

    def push_messages(self, messages):
        return self.hidden.push_messages(messages)

    def pull_messages(self, message_ids):
        return reversed(self.hidden._collect(set(message_ids), 1e9))


def fleet():
    devices = [DeviceProfile(speed, seconds_per_example=1.0) for speed in SPEEDS]
    return LocalGrid(app(GOALS, [100] * 5, 0.05), devices)


def history(grid, merges, **settings):
    strategy = History(FedBuff(fedavg(fraction_evaluate=1.0), **settings))
    found, result = models(strategy, grid, merges)
    lines = [(r["virtual_s"], r.get("fedbuff"), r["evaluate"]) for r in strategy.records]
    return lines, found, result


@pytest.mark.parametrize("settings", [{}, {"concurrency": 2}, {"weighting": "equal"}])
def test_a_simulation_with_emulated_devices_equals_a_local_grid(settings):
    lines, found, _ = history(fleet(), 25, **settings)
    again, same, _ = history(InMemoryGrid(fleet()), 25, **settings)
    assert same == pytest.approx(found)
    for one, other in zip(lines, again, strict=True):
        assert other[0] == pytest.approx(one[0])
        assert (other[1] or {}).get("nodes") == (one[1] or {}).get("nodes")
        assert other[2] == pytest.approx(one[2])
    assert lines[-1][0] > STEPS
