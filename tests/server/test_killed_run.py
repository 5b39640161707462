"""A ServerApp's process that is killed with SIGKILL, at any moment, and resumed."""

import os
import subprocess
import sys
from pathlib import Path

from recording import checkpoint, history, timeless

MOMENTS = 4


def left_behind(folder: Path) -> dict:
    """Return what a run left, but for wall times."""
    arrays, meta = checkpoint(folder / "checkpoint" / "state.npz")
    state = {name: array.tolist() for name, array in arrays.items()} | {"meta": timeless(meta)}
    return {
        "history": [timeless(record) for record in history(folder)],
        "model": (folder / "model.safetensors").read_bytes(),
        "checkpoint": state,
        "metrics": (folder / "checkpoint" / "metrics.jsonl").read_text(),
    }


def test_killed_at_any_moment_equals_unbroken(tmp_path):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_run.py"), tmp_path, str(MOMENTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reached = [int(line) for line in done.stdout.split()]
    assert len(reached) == MOMENTS
    assert len(set(reached)) >= 3, "moments spread over the rounds"
    whole = left_behind(tmp_path / "whole")
    assert [record["round"] for record in whole["history"]] == list(range(6))
    for number in range(MOMENTS + 1):  # the last one SIGTERM ended
        assert left_behind(tmp_path / f"broken-{number}") == whole, number
