"""Mercury's app of the studies on emulated nodes."""

import pytest
from app_run import AppRun

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile

COMMON = {"model": "softmax", "partition": "iid", "reshard_share": 0.2, "reshard_budget": 5000}
TEXTS = {"dataset": "stdlib", "model": "bag", "learning_rate": 0.5}


@pytest.mark.parametrize(
    ("kind", "data", "rounds"), [("importance", {}, 7), ("random", {}, 7), ("random", TEXTS, 3)]
)
def test_resharding_moves_samples_keeps_sizes_and_learns(kind, data, rounds):
    run = AppRun("mercury", [DeviceProfile()] * 3, **COMMON | {"resharding": kind} | data)
    before = run.evaluate()["loss"]
    sizes = [record["resharding"] for record in run.go_on(rounds)]
    assert sum(size["swaps"] for size in sizes) > 10
    assert all(size["offered_bytes"] <= 3 * 5000 for size in sizes)
    assert len(run.state()[keys.PREFIX + "shard.arrays"]["slots"].numpy()) > 5
    assert run.history.records[-1]["sampler"]["coverage"] > 0.8
    assert run.evaluate()["loss"] < 0.9 * before
