import signal

import pytest
from waiting import wait_until

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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("option", "file", "error"),
    [
        ("--auth-supernode-private-key", "stranger", "Failed to initialize the connection"),
        ("--root-certificates", "ca.crt", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_unknown_key_or_authority_is_refused(small_fleet, tmp_path, option, file, error):
    certificates.make_node_key(tmp_path, "stranger")
    certificates.make_authority(tmp_path)
    fleet = small_fleet.file
    command = processes.supernode_command(small_fleet.folder, fleet, fleet.nodes[0])
    command[command.index(option) + 1] = str(tmp_path / file)
    command[command.index("--port") + 1] = str(processes.free_ports(1)[0])
    if option == "--root-certificates":
        command += ["--max-retries", "0"]
    log, environment = tmp_path / "supernode.log", processes.environment(tmp_path / "home")
    pid = processes.start(command, small_fleet.folder, log, environment)  # ends with the fleet
    wait_until(lambda: not small_fleet.is_alive(pid), timeout_s=60, step_s=0.1)
    assert error in log.read_text()


@pytest.mark.nightly
def test_ended_process_is_seen_and_starts_again(small_fleet):
    node = small_fleet.file.node("node-0")
    small_fleet.end_process(node.pid, signal.SIGTERM)
    assert not small_fleet.is_alive(node.pid)
    wait_until(lambda: small_fleet.online() == {"node-1"}, timeout_s=30)  # none: no answer yet
    small_fleet.start_node("node-0")
    small_fleet.wait_online(["node-0"])
    assert small_fleet.file.node("node-0").pid != node.pid
