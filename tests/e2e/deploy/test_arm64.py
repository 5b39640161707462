"""A SuperNode on 64-bit ARM, emulated, in one fleet with native ones."""

import os
from pathlib import Path

import pytest

from flwr_hetero.fleet import RealFleet, processes
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

ROOT = os.environ.get("FLWR_HETERO_ARM64_ROOT", "")
REPOSITORY = Path(__file__).parents[3]
IN_ROOT = [str(REPOSITORY / "deploy" / "arm64-root"), ROOT]
ARM = "node-2"

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.nightly,
    pytest.mark.skipif(not ROOT, reason="FLWR_HETERO_ARM64_ROOT: a folder of deploy/arm64-root"),
]


class MixedFleet(RealFleet):
    """One SuperNode has this package, Python and libraries for ARM; keys and link as the others."""

    def _start(self, name, command):
        if name == ARM:
            machine = ["sh", "-c", 'uname -m; exec python3 "$@"', "-"]
            command = [*IN_ROOT, *machine, *command[1:]]
        return super()._start(name, command)


@pytest.fixture
def fleet(tmp_path):
    fleet = MixedFleet(tmp_path / "fleet", QUICK)
    fleet.up(3)
    yield fleet
    fleet.down(keep=True)
    assert processes.find(fleet.folder) == []


def test_arm_trains_beside_native_nodes(fleet, tmp_path):
    config = {"fleet": "real", "engine": "rounds", "num_server_rounds": 1}
    run = FleetRun(fleet, tmp_path / "run", REPOSITORY / "apps" / "fleet", **config)
    history = run.start().finish(1800)
    assert [record["round"] for record in history] == [0, 1], run.tail()
    assert not any(record["failures"] for record in history)
    weights = history[1]["weights"]
    assert weights.keys() == {"node-0", "node-1", ARM}
    assert weights[ARM] > 0
    log = (fleet.folder / "logs" / f"{ARM}.log").read_text()
    assert log.splitlines()[0] == "aarch64"
