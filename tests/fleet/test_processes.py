import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from waiting import wait_until

from flwr_hetero.fleet import processes
from flwr_hetero.fleet.processes import FleetFile, SuperNodeSpec

SLEEP = "import time; print('up', flush=True); time.sleep(300)"
WITH_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    f"time.sleep(300)'], start_new_session=True); {SLEEP}"
)
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture
def start(tmp_path):
    def run(code: str, folder=tmp_path) -> int:
        log = tmp_path / f"{time.monotonic_ns()}.log"
        pid = processes.start([sys.executable, "-c", code], folder, log, dict(os.environ))
        wait_until(lambda: "up" in log.read_text(), step_s=0.01)
        return pid

    yield run
    processes.end(tmp_path, grace_s=0.0)


def test_end_finds_children_in_other_sessions(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    pid, stranger = start(WITH_CHILD), start(SLEEP, other)
    wait_until(lambda: len(processes.find(tmp_path)) >= 2, step_s=0.01)
    assert pid in processes.find(tmp_path)
    assert processes.end(tmp_path) == 2
    assert processes.find(tmp_path) == []
    assert processes.has_tag(stranger, other)
    assert processes.end(other) == 1


def test_signal_goes_to_tagged_processes_only(start, tmp_path, monkeypatch):
    pid, sent = start(SLEEP), []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", lambda handle, number: sent.append(number))
        processes.signal_one(pid, tmp_path / "other", signal.SIGTERM)
        assert sent == []
        processes.signal_one(pid, tmp_path, signal.SIGTERM)
    assert sent == [signal.SIGTERM, signal.SIGCONT]


def test_end_kills_deaf_and_stopped_processes(start, tmp_path):
    start(DEAF)
    os.kill(start(SLEEP), signal.SIGSTOP)
    assert processes.end(tmp_path, grace_s=0.3) == 2
    assert processes.find(tmp_path) == []


def test_ended_process_has_no_tag(start, tmp_path):
    pid = start("print('up', flush=True)")
    wait_until(lambda: not processes.has_tag(pid, tmp_path), step_s=0.01)
    gone = f"/proc/{pid}"  # without an environment even before it can be collected
    wait_until(lambda: not os.path.exists(gone), step_s=0.01, meanwhile=processes.collect)
    for none in (pid, 0, -1):  # ended, never started
        processes.signal_one(none, tmp_path, signal.SIGKILL)


@pytest.mark.parametrize("state", ["loads", "hangs", "zombie"])
def test_tag_of_a_process_between_programs(tmp_path, monkeypatch, state):
    """For a moment it has neither arguments nor environment."""
    process, slept = tmp_path / "proc" / "7", []
    process.mkdir(parents=True)
    (process / "environ").touch()
    if state != "zombie":
        (process / "exe").symlink_to("/bin/true")

    def sleep(seconds):
        slept.append(seconds)
        if state == "loads":
            (process / "environ").write_bytes(f"A=1\0{processes.TAG}={tmp_path}\0".encode())

    clock = iter(range(9))
    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: 0.15 * next(clock))
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    monkeypatch.setattr(processes, "time", fake)
    assert processes.has_tag(7, tmp_path) == (state == "loads")
    assert bool(slept) == (state != "zombie")


# --- commands ----------------------------------------------------------------------


@pytest.fixture
def fleet():
    slow = SuperNodeSpec("node-0", port=2, relay_port=3, uplink_mbps=5.0)
    return FleetFile(port=1, nodes=[slow, SuperNodeSpec("node-1", cpu=0.5, port=4)])


def test_commands_use_tls_and_authentication(tmp_path, fleet):
    superlink = processes.superlink_command(tmp_path, fleet)
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} < set(superlink)
    assert not {"--insecure", "--database"} & set(superlink)
    database = FleetFile(port=1, database=True)
    assert "--database" in processes.superlink_command(tmp_path, database)
    first, second = (processes.supernode_command(tmp_path, fleet, node) for node in fleet.nodes)
    assert first[first.index("--superlink") + 1] == "127.0.0.1:3"  # through its relay
    assert second[second.index("--superlink") + 1] == "127.0.0.1:1"
    assert second[second.index("--node-config") + 1] == "partition-id=1 num-partitions=2"
    for command in (first, second):
        assert {"--root-certificates", "--auth-supernode-private-key"} < set(command)
        assert "--allow-runtime-dependency-installation" not in command


def test_prepare_makes_all_files_of_the_commands(tmp_path, fleet):
    processes.prepare(tmp_path, fleet)
    commands = [processes.superlink_command(tmp_path, fleet)]
    commands += [processes.supernode_command(tmp_path, fleet, node) for node in fleet.nodes]
    named = [word for command in commands for word in command[1:] if word.startswith("/")]
    assert len(named) == 3 + 2 * 2
    assert all((tmp_path / word).is_file() for word in named)


@pytest.mark.parametrize("spelling", ["no_proxy", "NO_PROXY"])
def test_environment_keeps_own_no_proxy(tmp_path, monkeypatch, spelling):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(spelling, "example.org")
    made = processes.environment(tmp_path / "home")
    assert made["FLWR_HOME"] == str(tmp_path / "home")
    assert made["no_proxy"] == made["NO_PROXY"] == "example.org,127.0.0.1,localhost"
