"""Apps on real SuperNodes, where each message has a process of its own."""

import json
from pathlib import Path

import pytest

from flwr_hetero_studies.faults.fleet_run import FleetRun

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
HERE = Path(__file__).parent
APPS = HERE.parents[2] / "apps"


def test_orders_are_kept_by_processes_that_end(small_fleet, tmp_path):
    config = {"fleet": "real", "num_server_rounds": 4}
    run = FleetRun(small_fleet, tmp_path / "run", APPS / "cd-grab", **config)
    history = run.start().finish()
    assert [record["round"] for record in history] == list(range(5)), run.tail()
    assert not any(record["failures"] for record in history)
    assert all(record["cd_grab"]["pairs"] > 0 for record in history[1:])
    assert history[-1]["global"]["accuracy"] > history[0]["global"]["accuracy"]


def test_superlink_is_like_local_grid_but_for_two_answers(small_fleet, tmp_path, monkeypatch):
    """This is the last test, because afterwards a node takes no more messages."""
    monkeypatch.syspath_prepend(str(HERE / "probe_app"))
    from probe_app.server_app import SUPERLINK

    run = FleetRun(small_fleet, tmp_path / "run", HERE / "probe_app")
    run.start().finish()
    path = tmp_path / "run" / "probe.json"
    assert path.exists(), run.tail()
    assert json.loads(path.read_text()) == SUPERLINK
