"""The table on a LocalGrid and in Flower's own simulation: Ray, and devices not emulated.

A real SuperLink is asked in tests/e2e/deploy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.conftest import GRID_APP
from e2e.grids.promises import check

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid, processes
from flwr_hetero_studies import rivals

NAMES = sorted({*ours.__all__, *rivals.__all__} - {"FedNova", "OverSelect", "Selection"})
"""Selection itself selects nothing, and two rivals have tests of their own only."""
BY_DAY = ["BiasedLocalSGD", "Compressed", "FedBuff", "Resharding", "TiFL"]
"""Rows that CI runs in Ray: steps, slices, no rounds, an error, tiers."""
BY_NIGHT = sorted({*NAMES} - {*BY_DAY})
NODES = 8
WORKERS = 2
DEVICES = [DeviceProfile(1.0 if i % 2 else 6.0, seconds_per_example=0.1) for i in range(NODES)]


@pytest.fixture(scope="module", autouse=True)
def simulation(tmp_path_factory):
    """Run rows in one simulation, beside the tests that come first; give folder and process."""
    folder = tmp_path_factory.mktemp("simulation")
    process = simulate(folder, BY_DAY)
    yield folder, process
    process.terminate()
    process.wait()


def simulate(folder, names):
    """Start a simulation of these rows."""
    environment = processes.environment(folder / "home")
    environment["PYTHONPATH"] = os.pathsep.join([str(GRID_APP), *filter(None, sys.path)])
    program = Path(__file__).with_name("simulate.py")
    command = [sys.executable, program, folder, str(NODES), str(WORKERS), *names]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def test_table_has_every_strategy(grid_app):
    assert sorted(grid_app[1].ROWS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_local_grid(name, grid_app):
    client_app, rows = grid_app
    check(name, rows.ROWS[name], rows.run(name, LocalGrid(client_app.app, DEVICES)))


@pytest.mark.nightly
def test_simulation_of_all_others(tmp_path, grid_app):
    assert simulate(tmp_path, BY_NIGHT).wait(timeout=1800) == 0, log_of(tmp_path)[-3000:]
    for name in BY_NIGHT:
        check(name, grid_app[1].ROWS[name], json.loads((tmp_path / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", BY_DAY)
def test_simulation(name, simulation, grid_app):
    folder, process = simulation
    assert process.wait(timeout=1800) == 0, log_of(folder)[-3000:]
    check(name, grid_app[1].ROWS[name], json.loads((folder / f"{name}.json").read_text()))


def log_of(folder):
    return (folder / "log").read_text(errors="replace")
