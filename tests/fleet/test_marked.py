import os
import signal
import sys
import time

import pytest
from waiting import wait_until

from flwr_hetero.fleet import processes as marked

WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print("up", flush=True)
time.sleep(300)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""


@pytest.fixture
def start(tmp_path):
    def run(code: str, folder=tmp_path) -> int:
        log = tmp_path / f"{time.monotonic_ns()}.log"
        pid = marked.start([sys.executable, "-c", code], folder, log, dict(os.environ))
        wait_until(lambda: "up" in log.read_text(), step_s=0.01)
        return pid

    yield run
    marked.end(tmp_path, grace_s=0.0)


def test_children_in_sessions_of_their_own_are_found_and_ended(start, tmp_path):
    pid = start(WITH_CHILD)
    wait_until(lambda: len(marked.find(tmp_path)) >= 2, step_s=0.01)
    assert pid in marked.find(tmp_path)
    assert marked.end(tmp_path) == 2
    assert marked.find(tmp_path) == []


def test_another_fleet_is_left_alone(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    pid = start("import time; print('up', flush=True); time.sleep(300)", other)
    assert marked.end(tmp_path) == 0
    assert marked.has_mark(pid, other)
    marked.end_one(pid, tmp_path, signal.SIGKILL)
    assert marked.has_mark(pid, other)
    assert marked.end(other) == 1


def test_deaf_and_stopped_processes_end_too(start, tmp_path):
    start(DEAF)
    os.kill(start("import time; print('up', flush=True); time.sleep(300)"), signal.SIGSTOP)
    assert marked.end(tmp_path, grace_s=0.3) == 2
    assert marked.find(tmp_path) == []


def test_a_process_that_ended_has_no_mark(start, tmp_path):
    pid = start("print('up', flush=True)")
    wait_until(lambda: not marked.has_mark(pid, tmp_path), step_s=0.01)
    marked.end_one(pid, tmp_path, signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline_s:
        marked.collect()  # a process has no environment any more before it can be collected
        time.sleep(0.01)
    marked.end_one(pid, tmp_path, signal.SIGKILL)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("pid", [0, -1])
def test_a_process_that_was_never_started_is_passed_over(tmp_path, pid):
    marked.end_one(pid, tmp_path, signal.SIGKILL)


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Process 7 between two programs: for a moment it has neither arguments nor environment."""
    process = tmp_path / "proc" / "7"
    process.mkdir(parents=True)
    (process / "environ").touch()
    monkeypatch.setattr(marked, "PROC", tmp_path / "proc")
    return process


def test_a_process_that_still_loads_its_program_is_not_taken_for_gone(
    tmp_path, process, monkeypatch
):
    def load(seconds):
        (process / "environ").write_bytes(f"A=1\0{marked.MARK}={tmp_path}\0".encode())

    (process / "exe").symlink_to("/bin/true")
    monkeypatch.setattr(marked.time, "sleep", load)
    assert marked.has_mark(7, tmp_path)


def test_zombies_are_not_waited_for(tmp_path, process, monkeypatch):
    monkeypatch.setattr(marked.time, "sleep", None)  # it would raise
    assert not marked.has_mark(7, tmp_path)


def test_a_process_without_environment_is_waited_for_in_vain(tmp_path, process, monkeypatch):
    (process / "exe").symlink_to("/bin/true")
    monkeypatch.setattr(marked, "EXEC_S", 0.0)
    assert not marked.has_mark(7, tmp_path)
