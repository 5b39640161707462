"""A killed run with CDGraB, resumed, equals one that was not killed."""

import random

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp import strategy as flower
from order_toy import order_app, order_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import CDGraB, Recorded, TiFL

FLEET = [DeviceProfile(jitter=0.1), DeviceProfile(2.0, jitter=0.1)] * 3
QUIET = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
NESTS = {
    "sketched": (lambda: CDGraB(flower.FedAdam(**QUIET), sketch_size=3), {}),
    "equal units": (lambda: CDGraB(flower.FedAvg(**QUIET), num_units=9), {}),
    "some of a pass": (lambda: CDGraB(flower.FedAvg(**QUIET)), {"passes": 0.5}),
    "inside TiFL": (lambda: TiFL(CDGraB(flower.FedAvg(**QUIET)), 2, 2, interval=2), {}),
}


class Folder:
    def __init__(self, path):
        self.checkpoint_dir = path
        self.records = []

    def append_round(self, record):
        self.records.append(record)

    def cut_after(self, last_round):
        self.records = [r for r in self.records if r["round"] <= last_round]

    def save_model(self, arrays):
        pass

    def finish(self):
        return self.checkpoint_dir


class KilledError(Exception):
    pass


def go(name, folder, killed_in=None, resume=False):
    def evaluate(server_round, arrays):
        if server_round == killed_in:
            raise KilledError
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    make, options = NESTS[name]
    random.seed(1)
    grid = LocalGrid(order_app([24, 24, 24, 16, 32, 24], **options), profiles=FLEET, seed=7)
    strategy = Recorded(make(), run_dir=folder, resume=resume)
    return strategy.start(grid, order_arrays(), num_rounds=8, evaluate_fn=evaluate)


@pytest.mark.parametrize("killed_in", [2, 6])
@pytest.mark.parametrize("name", NESTS)
def test_killed_and_resumed_equals_unbroken(tmp_path, name, killed_in):
    folders = [Folder(tmp_path / kind) for kind in ("whole", "broken")]
    for folder in folders:
        folder.checkpoint_dir.mkdir()
    whole = go(name, folders[0])
    with pytest.raises(KilledError):
        go(name, folders[1], killed_in=killed_in)
    resumed = go(name, folders[1], resume=True)
    assert [record["round"] for record in folders[1].records] == list(range(9))
    np.testing.assert_array_equal(resumed.arrays["w"].numpy(), whole.arrays["w"].numpy())
    for mine, theirs in zip(folders[1].records, folders[0].records, strict=True):
        for record in (mine, theirs):  # whole orders are sent after a resume
            record["bytes_down"] = record["cd-grab"]["bytes-down"] = record["wall_s"] = 0
        assert mine == theirs
