"""An app of Flower's older API in Flower's simulation, devices not emulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


def test_numpy_client_in_a_plain_simulation(tmp_path):
    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("simulate_older.py"), path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert path.exists(), (done.stdout + done.stderr)[-4000:]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert list(found) == ["FedSlice", "BiasedLocalSGD", "TiFL"]
    for name, outcome in found.items():
        assert outcome["rounds"] == 3, name
        assert all(0.5 < w < 6.0 for w in outcome["model"]), name
        assert len(outcome["evaluated"]) >= 1, name
        assert all({"accuracy", "loss"} == set(keys) for keys in outcome["evaluated"]), name
    assert len(found["FedSlice"]["evaluated"]) == 3
