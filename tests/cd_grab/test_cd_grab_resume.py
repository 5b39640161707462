"""A killed run with CDGraB, resumed, equals one that was not killed."""

import random

import pytest
from flwr.serverapp import strategy as flower
from order_toy import order_app, order_arrays
from recording import killed_and_resumed, timeless

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


@pytest.mark.parametrize("killed_in", [2, 6])
@pytest.mark.parametrize("name", NESTS)
def test_killed_and_resumed_equals_unbroken(tmp_path, name, killed_in):
    make, options = NESTS[name]

    def go(folder, evaluate_fn, resume):
        random.seed(1)
        grid = LocalGrid(order_app([24, 24, 24, 16, 32, 24], **options), profiles=FLEET, seed=7)
        strategy = Recorded(make(), run_dir=folder, resume=resume)
        return strategy.start(grid, order_arrays(), num_rounds=8, evaluate_fn=evaluate_fn)

    def same(record):  # whole orders are sent after a resume
        record["cd-grab"].pop("bytes-down")
        return timeless(record) | {"bytes_down": None}

    killed_and_resumed(go, tmp_path, killed_in, same)
