"""A run without rounds on real SuperNodes of three speeds, of which one is killed, one freezes."""

import signal

import pytest

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.throttle import descendants, send
from flwr_hetero_studies.faults.fleet_run import TOY_APP, FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
SPEEDS = [1.0, 1.0, 0.5, 0.25]
CPU, WORK = 0.4, 1.0
"""Share of the fastest node; CPU seconds that a node burns per message."""


@pytest.fixture
def four_nodes(tmp_path):
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    fleet.up([DeviceProfile(speed) for speed in SPEEDS], cpu=CPU)
    yield fleet
    fleet.down(keep=True)


def test_a_node_is_killed_and_one_freezes(four_nodes, tmp_path):
    sizes = {"clients_per_round": 4, "num_server_rounds": 8}
    config = sizes | {"engine": "buffered", "work": WORK, "timeout": 40.0}
    run = FleetRun(four_nodes, tmp_path / "run", TOY_APP, **config)
    run.start().wait_round(2)
    four_nodes.end_process(four_nodes.file.node("node-1").pid)
    frozen = four_nodes.file.node("node-0").pid
    pids = [frozen, *descendants(frozen)]
    send(pids, signal.SIGSTOP)
    try:
        history = run.finish(timeout_s=600)
    finally:
        send(pids, signal.SIGCONT)
    assert [record["round"] for record in history] == list(range(9))
    failed = {failure["node"] for record in history for failure in record["failures"]}
    assert failed <= {"node-0", "node-1"}
    assert set(history[-1]["fedbuff"]["nodes"]) <= {"node-2", "node-3"}
