"""A NumPyClient of the older API on a real SuperLink and SuperNodes."""

from pathlib import Path

import pytest

from flwr_hetero_studies.faults.fleet_run import FleetRun

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
APP = Path(__file__).parent / "older_app"


def test_numpy_client_in_deployment(small_fleet, tmp_path):
    run = FleetRun(small_fleet, tmp_path / "run", APP)
    rounds = run.start().finish()[1:]
    assert len(rounds) == 2, run.tail()
    assert rounds[-1]["train"]["train-loss"] < 9.0
    assert {"accuracy", "loss"} <= set(rounds[-1]["evaluate"])
    assert all(not record["failures"] for record in rounds), run.tail()
