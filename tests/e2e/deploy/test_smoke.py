import signal
import time

import pytest

from benchmarks.faults.experiment import Experiment
from flwr_hetero.fleet import certificates, processes

pytestmark = pytest.mark.deploy


def test_run_over_tls_with_registered_nodes(small_fleet, toy_app, tmp_path):
    run = Experiment(small_fleet, tmp_path / "run", toy_app, num_server_rounds=2, work=0.5)
    history = run.start().finish()
    assert [record["round"] for record in history] == [0, 1, 2], run.tail()
    assert not any(record["failures"] for record in history)
    assert sorted(history[0]["tifl"]["tiers"]) == ["node-0", "node-1"]
    assert {tuple(sorted(record["selected"])) for record in history[1:]} == {("node-0", "node-1")}
    assert all(seconds >= 0.5 for seconds in history[1]["latency"].values())


def test_supernode_without_registered_key_is_refused(small_fleet, tmp_path):
    certificates.make_node_key(tmp_path, "stranger")
    fleet = small_fleet.file
    command = processes.supernode_command(small_fleet.folder, fleet, fleet.nodes[0])
    command[command.index("--auth-supernode-private-key") + 1] = str(tmp_path / "stranger")
    command[command.index("--port") + 1] = str(processes.free_ports(1)[0])
    assert "Failed to initialize the connection" in last_words(small_fleet, command, tmp_path)


def test_superlink_of_another_authority_is_refused(small_fleet, tmp_path):
    certificates.make_authority(tmp_path)
    fleet = small_fleet.file
    command = processes.supernode_command(small_fleet.folder, fleet, fleet.nodes[0])
    command[command.index("--root-certificates") + 1] = str(tmp_path / "ca.crt")
    command[command.index("--port") + 1] = str(processes.free_ports(1)[0])
    words = last_words(small_fleet, [*command, "--max-retries", "0"], tmp_path)
    assert "CERTIFICATE_VERIFY_FAILED" in words


def last_words(fleet, command, folder) -> str:
    """Run a SuperNode that cannot get in, as one of the fleet so that it ends with it."""
    log = folder / "supernode.log"
    environment = processes.environment(folder / "home")
    pid = processes.start(command, fleet.folder, log, environment)
    deadline_s = time.monotonic() + 60
    while fleet.is_alive(pid):
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)
    words = log.read_text()
    assert words, f"process {pid} said nothing before it ended"
    return words


def test_ended_process_is_seen_and_starts_again(small_fleet):
    node = small_fleet.file.node("node-0")
    small_fleet.end_process(node.pid, signal.SIGTERM)
    assert not small_fleet.is_alive(node.pid)
    deadline_s = time.monotonic() + 30
    while small_fleet.online() != {"node-1"}:  # none: the SuperLink has not answered
        assert time.monotonic() < deadline_s
    small_fleet.start_node("node-0")
    small_fleet.wait_online(["node-0"])
    assert small_fleet.file.node("node-0").pid != node.pid
