"""A task beyond images on real SuperNodes, where each message has a process of its own."""

from pathlib import Path

import pytest

from flwr_hetero_studies.faults.fleet_run import FleetRun

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
APP = Path(__file__).parents[3] / "apps" / "mercury"


def test_forecasting_on_a_real_fleet(small_fleet, tmp_path):
    config = {"dataset": "series", "model": "auto", "learning_rate": 0.2, "local_steps": 40}
    config |= {"fleet": "real", "num_server_rounds": 4}
    run = FleetRun(small_fleet, tmp_path / "run", APP, **config)
    history = run.start().finish()
    assert [record["round"] for record in history] == list(range(5)), run.tail()
    assert not any(record["failures"] for record in history)
    assert history[-1]["global"]["accuracy"] > 0.87
    assert history[-1]["global"]["smape"] < history[0]["global"]["smape"] / 2
