"""Four methods at once on six real SuperNodes of three speeds."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
COMPOSITION_APP = Path(__file__).parent / "composition_app"
SPEEDS = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
CPU, WORK = 0.5, 0.25
"""Share of the fastest node; CPU seconds that the app burns when it is profiled."""


@pytest.fixture
def six_nodes(tmp_path):
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    fleet.up([DeviceProfile(speed) for speed in SPEEDS], cpu=CPU)
    yield fleet
    fleet.down(keep=True)


def test_four_methods_on_six_real_nodes(six_nodes, tmp_path):
    folder = tmp_path / "run"
    history = FleetRun(six_nodes, folder, COMPOSITION_APP, work=WORK).start().finish(timeout_s=600)
    assert [record["round"] for record in history] == [0, 1, 2, 3, 4], history
    assert not any(record["failures"] for record in history)
    tiers, latency = (history[0]["tifl"][key] for key in ("tiers", "latency"))
    assert sorted(tiers.values()) == [0, 0, 1, 1, 2, 2]
    by_latency = sorted(tiers, key=lambda name: latency[name])
    assert [tiers[name] for name in by_latency] == [0, 0, 1, 1, 2, 2]
    # a machine with other work may make any of them slow, but none faster than its share
    assert all(latency[f"node-{i}"] > 0.7 * WORK / (CPU * SPEEDS[i]) for i in range(6))
    for record in history[1:]:
        assert {tiers[name] for name in record["selected"]} == {record["tifl"]["tier"]}
        steps = record["biased_local_sgd"]["num_steps"]
        assert sorted(steps) == sorted(record["selected"])
        assert all(1 <= number <= 8 for number in steps.values())
        if any(steps[f"node-{i}"] >= 2 for i in (0, 2, 4) if f"node-{i}" in steps):
            assert record["cd-grab"]["pairs"] > 0  # even nodes report pairs of units
    w = load_file(next(folder.glob("*.safetensors")))["w"]
    truth = np.arange(1, 6)
    assert np.linalg.norm(w - truth) < np.linalg.norm(truth)
