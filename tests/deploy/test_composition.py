"""Four methods at once on six real SuperNodes of three speeds."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.faults.experiment import Experiment
from benchmarks.faults.scenarios import QUICK
from flwr_hetero.fleet import DeviceProfile, RealFleet

pytestmark = [pytest.mark.deploy, pytest.mark.slow_deploy]
NEST_APP = Path(__file__).parent / "nest_app"
SPEEDS = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
FAST, SLOW = {"node-0", "node-1"}, {"node-4", "node-5"}


@pytest.fixture
def six_nodes(tmp_path):
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    fleet.up([DeviceProfile(speed) for speed in SPEEDS], cpu=0.5)
    yield fleet
    fleet.down(keep=True)


def test_tifl_biased_local_sgd_cd_grab_and_mercury_together(six_nodes, tmp_path):
    folder = tmp_path / "run"
    history = Experiment(six_nodes, folder, NEST_APP).start().finish(timeout_s=600)
    assert [record["round"] for record in history] == [0, 1, 2, 3, 4], history
    assert not any(record["failures"] for record in history)
    tiers = history[0]["tifl"]["tiers"]
    assert sorted(tiers.values()) == [0, 0, 1, 1, 2, 2]
    assert {name for name, tier in tiers.items() if tier == 0}.isdisjoint(SLOW)
    assert {name for name, tier in tiers.items() if tier == 2}.isdisjoint(FAST)
    for record in history[1:]:
        assert {tiers[name] for name in record["selected"]} == {record["tifl"]["tier"]}
        steps = record["biased-local-sgd"]["num-steps"]
        assert sorted(steps) == sorted(record["selected"])
    ordered = [r for r in history[1:] if {int(n[-1]) % 2 for n in r["selected"]} >= {0}]
    assert any(record["cd-grab"]["pairs"] > 0 for record in ordered)
    fast, slow = (
        [
            record["biased-local-sgd"]["num-steps"][name]
            for record in history[1:]
            for name in set(record["selected"]) & nodes
        ]
        for nodes in (FAST, SLOW)
    )
    assert not (fast and slow) or min(fast) > max(slow)
    w = load_file(next(folder.glob("*.safetensors")))["w"]
    truth = np.arange(1, 6)
    assert np.linalg.norm(w - truth) < np.linalg.norm(truth)
