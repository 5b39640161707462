"""An asynchronous run beside a synchronous one on real SuperNodes of three speeds."""

import os
import signal

import pytest
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.throttle import descendants
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
SPEEDS = [1.0, 1.0, 0.5, 0.25]
CPU, WORK = 0.4, 1.0
"""Share of the fastest node; CPU seconds that a node burns per message."""


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory):
    fleet = RealFleet(tmp_path_factory.mktemp("four") / "fleet", QUICK)
    fleet.up([DeviceProfile(speed) for speed in SPEEDS], cpu=CPU)
    yield fleet
    fleet.down(keep=True)


def go(fleet, folder, app, **config):
    """Return the history and the model of a run."""
    run = FleetRun(fleet, folder, app, work=WORK, clients_per_round=4, **config)
    history = run.start().finish(timeout_s=600)
    return history, float(load_file(next(folder.glob("*.safetensors")))["w"][0])


def test_both_engines_on_one_fleet(four_nodes, tmp_path, toy_app):
    rounds, w_rounds = go(four_nodes, tmp_path / "rounds", toy_app, num_server_rounds=4)
    merges, w_merges = go(
        four_nodes, tmp_path / "merges", toy_app, num_server_rounds=8, engine="buffered"
    )
    assert [record["round"] for record in merges] == list(range(9))
    assert not any(record["failures"] for record in rounds + merges)
    # the goal is the mean of the partitions' numbers, whatever their speed
    assert w_rounds == pytest.approx(1.5, abs=0.2)
    assert w_merges == pytest.approx(1.5, abs=0.5)
    nodes = [node for record in merges[1:] for node in record["fedbuff"]["nodes"]]
    counts = [nodes.count(f"node-{i}") for i in range(4)]
    assert min(counts) >= 1
    assert counts[0] + counts[1] > counts[2] + counts[3]
    for record in merges[1:]:
        assert max(record["fedbuff"]["staleness"]) <= record["round"]


def test_a_node_is_killed_and_one_freezes(four_nodes, tmp_path, toy_app):
    run = FleetRun(
        four_nodes,
        tmp_path / "run",
        toy_app,
        work=WORK,
        clients_per_round=4,
        num_server_rounds=8,
        engine="buffered",
        timeout=40.0,
    )
    run.start().wait_round(2)
    four_nodes.end_process(four_nodes.file.node("node-1").pid, signal.SIGKILL)
    frozen = four_nodes.file.node("node-0").pid
    pids = [frozen, *descendants(frozen)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        history = run.finish(timeout_s=600)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert [record["round"] for record in history] == list(range(9))
    failed = {failure["node"] for record in history for failure in record["failures"]}
    assert failed <= {"node-0", "node-1"}
    last = history[-1]["fedbuff"]["nodes"]
    assert set(last) <= {"node-2", "node-3"}
