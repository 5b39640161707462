"""A real SuperLink and SuperNodes over TLS: strategies, refused nodes, processes that end."""

import json

import pytest
from e2e.conftest import GRID_APP
from e2e.grids.promises import check
from waiting import wait_until

from flwr_hetero.fleet import RealFleet, certificates, processes
from flwr_hetero_studies.faults.fleet_run import FleetRun, command_of
from flwr_hetero_studies.faults.scenarios import QUICK
from flwr_hetero_studies.real.throttle import children

pytestmark = pytest.mark.deploy


def run_rows(fleet, folder, table, rounds, **config):
    """Run rows of the table of tests/e2e/grids in one run; check and give what came of each."""
    rows = " ".join(f"{name}:{count}" for name, count in rounds.items())
    run = FleetRun(fleet, folder, GRID_APP, rows=rows, **config)
    run.start().wait("the end of the run", run.is_over, 3600)
    outcomes = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert outcomes.keys() == rounds.keys(), run.tail()
    for name, count in rounds.items():
        check(name, table[name], outcomes[name], count, by_speed=False, **config)
    return outcomes


def check_nodes(fleet, folder, table, name):
    outcomes = run_rows(fleet, folder, table, {name: 1}, on_nodes=False)
    nodes = {node for line in outcomes[name]["records"] for node in line["selected"]}
    assert nodes == {"node-0", "node-1"}
    parts = {part for line in outcomes[name]["records"] for part in line.get("seconds", ())}
    assert parts >= {"wait", "start", "receive", "train"}


def parents_of_apps(fleet):
    """Return how many processes each node has that keep an app loaded."""
    launchers = [pid for node in fleet.file.nodes for pid in children(node.pid)]
    # an ended message is a zombie, without a command line
    below = [[app for first in children(pid) for app in children(first)] for pid in launchers]
    return [sum(bool(command_of(pid)) for pid in pids) for pids in below]


def test_a_strategy_over_tls_with_registered_nodes(small_fleet, tmp_path, grid_app):
    check_nodes(small_fleet, tmp_path / "run", grid_app[1].ROWS, "FedSlice")
    # the app stays loaded, and its messages have ended
    wait_until(lambda: parents_of_apps(small_fleet) == [1, 1], step_s=0.1)
    logs = [(small_fleet.folder / "logs" / f"node-{i}.log").read_text() for i in range(2)]
    assert all("not warm" not in log and "cold" not in log for log in logs), logs
    assert all("does not explain its faults" not in log for log in logs), logs


@pytest.mark.nightly
def test_a_strategy_on_flowers_own_nodes(tmp_path, grid_app):
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    fleet.up(2, warm=False)
    try:
        check_nodes(fleet, tmp_path / "run", grid_app[1].ROWS, "TiFL")
        log = (fleet.folder / "logs" / "node-0.log").read_text()
        assert "this node is cold, as Flower's own nodes are: --cold was given" in log
        assert "Start `flwr-clientapp` process" in log
    finally:
        fleet.down(keep=True)


@pytest.mark.nightly
def test_steps_follow_the_nodes_own_clocks(small_fleet, tmp_path, grid_app):
    rounds = {"FedBuff": 1, "BiasedLocalSGD": 2}
    outcomes = run_rows(small_fleet, tmp_path / "run", grid_app[1].ROWS, rounds, on_nodes=False)
    steps = outcomes["BiasedLocalSGD"]["records"][-1]["biased_local_sgd"]["num_steps"]
    assert steps["node-0"] > steps["node-1"]


@pytest.mark.nightly
def test_every_strategy_on_a_superlink(fleet, tmp_path, grid_app):
    table = grid_app[1].ROWS
    run_rows(fleet, tmp_path / "run", table, {name: row.rounds for name, row in table.items()})


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
    log = tmp_path / "supernode.log"
    environment = processes.environment(tmp_path / "home")
    process = processes.start(command, small_fleet.folder, log, environment)
    process.wait(timeout=60)
    assert error in log.read_text()
