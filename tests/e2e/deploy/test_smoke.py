"""A real SuperLink and SuperNodes over TLS: strategies, refused nodes, processes that end."""

import json

import pytest
from e2e.conftest import GRID_APP
from e2e.grids.promises import check
from waiting import wait_until

from flwr_hetero.fleet import certificates, processes
from flwr_hetero_studies.faults.fleet_run import FleetRun

pytestmark = pytest.mark.deploy


def run_rows(fleet, folder, table, rounds, **config):
    """Run rows of the table of tests/e2e/grids in one run; check and give what came of each."""
    rows = " ".join(f"{name}:{count}" for name, count in rounds.items())
    run = FleetRun(fleet, folder, GRID_APP, rows=rows, **config)
    run.start().wait("the end of the run", run.is_over, 3600)
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert found.keys() == rounds.keys(), run.tail()
    for name, count in rounds.items():
        check(name, table[name], found[name], count, by_speed=False, **config)
    return found


@pytest.mark.parametrize("name", ["FedSlice", pytest.param("TiFL", marks=pytest.mark.nightly)])
def test_a_strategy_over_tls_with_registered_nodes(small_fleet, tmp_path, grid_app, name):
    folder, table = tmp_path / "run", grid_app[1].ROWS
    found = run_rows(small_fleet, folder, table, {name: 1}, on_nodes=False)
    nodes = {node for line in found[name]["records"] for node in line["selected"]}
    assert nodes == {"node-0", "node-1"}
    parts = {part for line in found[name]["records"] for part in line.get("seconds", ())}
    assert parts >= {"wait", "start", "receive", "train"}


@pytest.mark.nightly
def test_steps_follow_the_nodes_own_clocks(small_fleet, tmp_path, grid_app):
    rounds = {"FedBuff": 1, "BiasedLocalSGD": 2}
    found = run_rows(small_fleet, tmp_path / "run", grid_app[1].ROWS, rounds, on_nodes=False)
    steps = found["BiasedLocalSGD"]["records"][-1]["biased_local_sgd"]["num_steps"]
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
    log, environment = tmp_path / "supernode.log", processes.environment(tmp_path / "home")
    pid = processes.start(command, small_fleet.folder, log, environment)  # ends with the fleet
    wait_until(lambda: not small_fleet.is_alive(pid), timeout_s=60, step_s=0.1)
    assert error in log.read_text()
