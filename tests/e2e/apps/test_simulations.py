"""Flower's own simulation, devices not emulated: what a LocalGrid is held against."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent


def test_unusual_messages_are_answered_as_by_a_local_grid(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent / "deploy" / "probe_app"))
    from probe_app.server_app import FLOWER

    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, HERE / "simulate_probe.py", path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert path.exists(), (done.stdout + done.stderr)[-4000:]
    assert json.loads(path.read_text(encoding="utf-8")) == FLOWER
