"""A LocalGrid does with unusual messages what Flower's grids do; those are asked in tests/e2e."""

import sys
from pathlib import Path

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedBuff, Wrapper

APP = Path(__file__).parents[1] / "e2e" / "deploy" / "probe_app"


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from probe_app import client_app, server_app

    yield client_app, server_app
    for name in [name for name in sys.modules if name.startswith("probe_app")]:
        del sys.modules[name]


def test_local_grid_is_like_flowers(probe):
    client_app, server_app = probe
    grid = LocalGrid(client_app.app, [DeviceProfile()] * 2)
    assert server_app.probe(grid) == server_app.EXPECTED
    assert grid.traffic.pending == {}


@pytest.mark.parametrize("strategy", [Wrapper, FedBuff])
def test_no_time_out(strategy):
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 3)
    inner = FedAvg(fraction_evaluate=0.0)
    result = strategy(inner).start(grid, toy_arrays(), 2, timeout=None)
    assert len(result.train_metrics_clientapp) == 2


def test_replies_that_nobody_fetches_are_forgotten():
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 3)
    sizes = []
    for _ in range(40):
        content = {"arrays": toy_arrays(), "metrics": MetricRecord()}
        asked = [Message(RecordDict(content), n, "train", ttl=10) for n in grid.get_node_ids()]
        kept, lost = asked[:2], asked[2:]
        grid.push_messages(lost)
        grid.send_and_receive(kept)
        grid.virtual_time_s += 1.0
        traffic = grid.traffic
        sizes.append([len(traffic.pending), len(traffic.in_order), len(traffic.kept_until)])
    assert max(sizes[-20:]) <= max(sizes[:20])
    assert grid.traffic.asked == 120
