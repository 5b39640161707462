"""Flower's own simulation, devices not emulated: what a LocalGrid is held against."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent


def found_by(program, path):
    """Run a program of this folder that writes what it finds."""
    done = subprocess.run(
        [sys.executable, HERE / program, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert path.exists(), (done.stdout + done.stderr)[-4000:]
    return json.loads(path.read_text(encoding="utf-8"))


def test_unusual_messages_are_answered_as_by_a_local_grid(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent / "deploy" / "probe_app"))
    from probe_app.server_app import FLOWER

    assert found_by("simulate_probe.py", tmp_path / "found.json") == FLOWER


def test_numpy_client_of_the_older_api(tmp_path):
    found = found_by("simulate_older.py", tmp_path / "found.json")
    assert list(found) == ["FedSlice", "BiasedLocalSGD", "TiFL"]
    for name, outcome in found.items():
        assert outcome["rounds"] == 3, name
        assert all(0.5 < w < 6.0 for w in outcome["model"]), name
        assert len(outcome["evaluated"]) >= 1, name
        assert all({"accuracy", "loss"} == set(keys) for keys in outcome["evaluated"]), name
    assert len(found["FedSlice"]["evaluated"]) == 3
