"""A first Flower app gets TiFL with two changed lines on the node, and Mercury with five."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from dropin.patching import apply, node_lines
from flwr.app import Context, RecordDict

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.sampler import MercurySampler
from flwr_hetero.strategy import TiFL

HERE = Path(__file__).parent
CONFIG = {"local-epochs": 1, "learning-rate": 0.1, "batch-size": 16}
FAST, SLOW = DeviceProfile(4.0), DeviceProfile(0.25)


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """Give a function that changes a copy of the app by a diff and runs it on four nodes."""

    def run(diff, num_rounds, slow=SLOW, **config):
        shutil.copytree(HERE / "quickstart", tmp_path, dirs_exist_ok=True)
        apply((HERE / diff).read_text(encoding="utf-8"), tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        server, client = (importlib.import_module(f"quickstart.{s}_app") for s in sides)
        settings = {**CONFIG, **config, "num-server-rounds": num_rounds}
        grid = LocalGrid(client.app, [FAST, slow, FAST, slow], run_config=settings)
        server.app(grid=grid, context=Context(1, 1, {}, RecordDict(), settings))
        return grid

    sides = ("server", "client")
    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]


def test_tifl_in_two_lines(quickstart, monkeypatch):
    assert node_lines((HERE / "tifl.diff").read_text()) <= 2
    records, keep = [], TiFL.on_round_end

    def spy(self, run, record):
        keep(self, run, record)
        records.append(record)

    monkeypatch.setattr(TiFL, "on_round_end", spy)
    quickstart("tifl.diff", 12, DeviceProfile(1.0), **{"batch-size": 128})
    tiers = [{"node-0", "node-2"}, {"node-1", "node-3"}]
    assert set(records[1]["selected"]) == tiers[0]  # the first to answer; the others are timed
    drawn = [record["tifl"]["tier"] for record in records[2:]]
    assert set(drawn) == {0, 1}
    assert [set(record["selected"]) for record in records[2:]] == [tiers[tier] for tier in drawn]


def test_mercury_in_five_lines(quickstart, monkeypatch):
    assert node_lines((HERE / "mercury.diff").read_text()) <= 5
    weights, draw = [], MercurySampler.next_batch

    def spy(self):
        batch = draw(self)
        weights.append(batch[1])
        return batch

    monkeypatch.setattr(MercurySampler, "next_batch", spy)
    grid = quickstart("mercury.diff", 4, **{"local-epochs": 2, "learning-rate": 0.3})
    last = np.concatenate(weights[-len(weights) // 4 :])
    assert last.min() < 0.9
    assert last.max() > 1.1
    for node in grid.get_node_ids():  # kept for the next round, and learnt from its own losses
        state = grid.context(node).state["flwr-hetero.sampler.arrays"]
        assert np.ptp(state["importance"].numpy()) > 0.1


def test_the_app_runs_without_a_change(quickstart, capsys, monkeypatch):
    monkeypatch.setattr(f"{apply.__module__}.Path.write_text", lambda *_, **__: None)
    quickstart("tifl.diff", 1)
    assert "accuracy" in capsys.readouterr().out
