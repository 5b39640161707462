"""Mercury's app of the studies on emulated nodes: samplings, hidden scoring and resharding."""

import pytest
from app_run import AppRun

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile

SLOW_LINK = [DeviceProfile(uplink_mbps=10, downlink_mbps=10, seconds_per_example=1e-4)] * 3
COMMON = {"model": "softmax", "local_steps": 3, "partition": "iid"}


def start(profiles=SLOW_LINK, **settings):
    return AppRun("mercury", profiles, **COMMON | settings)


@pytest.mark.parametrize(
    ("settings", "coverage"),
    [({"sampling": "bacc"}, 1.0), ({"sampling": "uniform"}, None), ({"estimator": "paper"}, 1.0)],
)
def test_sampling_of_mercury_learns(settings, coverage):
    run = start(**settings)
    assert run.loss_ratio(5) < 0.7
    assert coverage is None or run.history.records[-1]["sampler"]["coverage"] >= coverage
    if "estimator" in settings:
        assert run.state()[keys.PREFIX + "mercury.scalars"]["estimator"] == "paper"


def test_scoring_costs_no_time():
    seconds = []
    for sampling in ("uniform", "bacc"):
        records = start(sampling=sampling).go_on(4)
        seconds.append(records[3]["virtual_s"] - records[2]["virtual_s"])
    assert seconds[1] / seconds[0] == pytest.approx(1.0, rel=0.02)
    assert records[-1]["sampler"]["hidden-share"] == 1.0


TEXTS = {"dataset": "stdlib", "model": "bag", "learning_rate": 0.5}


@pytest.mark.parametrize(("kind", "data"), [("importance", {}), ("random", {}), ("random", TEXTS)])
def test_resharding_moves_samples_and_keeps_sizes(kind, data):
    run = start(resharding=kind, reshard_share=0.2, reshard_budget=5000, **data)
    sizes = [record["resharding"] for record in run.go_on(7)]
    assert sum(size["swaps"] for size in sizes) > 10
    assert all(size["offered_bytes"] <= 3 * 5000 for size in sizes)
    assert len(run.state()[keys.PREFIX + "shard.arrays"]["slots"].numpy()) > 5
