"""A real SuperLink does with unusual messages what a LocalGrid does, but for SUPERLINK."""

import json
from pathlib import Path

import pytest

from flwr_hetero_studies.faults.fleet_run import FleetRun

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
APP = Path(__file__).parent / "probe_app"


def test_superlink_is_like_local_grid(small_fleet, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from probe_app.server_app import SUPERLINK

    run = FleetRun(small_fleet, tmp_path / "run", APP)
    run.start().finish()
    path = tmp_path / "run" / "probe.json"
    assert path.exists(), run.tail()
    found = json.loads(path.read_text())
    assert found == SUPERLINK
