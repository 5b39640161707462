"""Flower's simulation does with unusual messages what a LocalGrid does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
APP = Path(__file__).parents[1] / "deploy" / "probe_app"


def test_simulation_is_like_local_grid(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from probe_app.server_app import FLOWER

    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("simulate_probe.py"), tmp_path / "found.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (tmp_path / "found.json").exists(), done.stderr[-3000:]
    assert json.loads((tmp_path / "found.json").read_text()) == FLOWER
