"""The services work under the units' limits.

Without systemd as the first process only a part can be tried: system calls, address families,
capabilities and the mode of new files, not the view of the file system and of devices.
"""

import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from flwr_hetero.fleet import RealFleet, processes
from flwr_hetero_studies.faults.fleet_run import TOY_APP, FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
UNITS = sorted((Path(__file__).parents[3] / "deploy" / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
PYTHON = "/usr/bin/python3"


def has_seccomp() -> bool:
    return not subprocess.run([PYTHON, "-c", "import seccomp"], capture_output=True).returncode


@pytest.mark.skipif(ANALYZE is None or not has_seccomp(), reason="needs python3-seccomp, systemd")
def test_services_work_under_their_limits(tmp_path, monkeypatch):
    def limited(plain, unit, *about):
        return [PYTHON, Path(__file__).with_name("confined.py"), unit, *plain(*about)]

    for unit in UNITS:
        name = f"{unit.stem.removeprefix('flower-')}_command"
        monkeypatch.setattr(processes, name, partial(limited, getattr(processes, name), unit))
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    fleet.up(2, database=True)
    try:
        run = FleetRun(fleet, tmp_path / "run", TOY_APP, num_server_rounds=2, work=0.1)
        history = run.start().finish()
        assert [bool(record["train"]) for record in history] == [False, True, True], run.tail()
        pids = [fleet.file.superlink_pid, fleet.file.node("node-0").pid]
        for status in (Path(f"/proc/{pid}/status").read_text() for pid in pids):
            assert re.search(r"^CapBnd:\s0+$", status, re.MULTILINE)
            assert re.search(r"^Seccomp:\s2$", status, re.MULTILINE)
    finally:
        fleet.down()
