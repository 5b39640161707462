"""Windows and macOS: all but real nodes works."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("elsewhere.py")


@pytest.mark.parametrize("system", ["Windows", pytest.param("Darwin", marks=pytest.mark.nightly)])
def test_a_recorded_run_needs_no_linux(system, tmp_path):
    """Windows lacks all that macOS lacks, and more."""
    command = [sys.executable, SCRIPT, tmp_path, system]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
