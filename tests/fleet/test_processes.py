import os
import signal
import subprocess
import sys
import time

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


def test_file_survives_saving(tmp_path):
    nodes = [SuperNodeSpec("node-0", 1, 2), SuperNodeSpec("node-1", 1, 3, node_id="7")]
    fleet = FleetFile(port=1, database=True, superlink_pid=7, nodes=nodes)
    fleet.save(tmp_path)
    assert FleetFile.load(tmp_path) == fleet
    assert fleet.node("node-1") == nodes[1]
    with pytest.raises(ValueError, match=r"dir must hold a fleet, .*: start one with `up`"):
        FleetFile.load(tmp_path / "other")


def test_commands_use_tls_authentication_and_files_that_are_made(tmp_path):
    fleet = FleetFile(port=1, nodes=[SuperNodeSpec("node-0", 3, 2), SuperNodeSpec("node-1", 1, 4)])
    processes.prepare(tmp_path, fleet)
    superlink = processes.superlink_command(tmp_path, fleet)
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} < set(superlink)
    assert not {"--insecure", "--database"} & set(superlink)
    assert "--database" in processes.superlink_command(tmp_path, FleetFile(1, database=True))
    nodes = [processes.supernode_command(tmp_path, fleet, node) for node in fleet.nodes]
    values = [dict(zip(command[3::2], command[4::2], strict=True)) for command in nodes]
    assert [found["--superlink"] for found in values] == ["127.0.0.1:3", "127.0.0.1:1"]
    assert values[1]["--node-config"] == "partition-id=1 num-partitions=2"
    for found in values:
        assert {"--root-certificates", "--auth-supernode-private-key"} < found.keys()
    named = [word for each in (superlink, *nodes) for word in each[1:] if word.startswith("/")]
    assert len(named) == 3 + 2 * 2
    assert all((tmp_path / word).is_file() for word in named)


@pytest.mark.parametrize("spelling", ["no_proxy", "NO_PROXY"])
def test_environment_keeps_own_no_proxy(tmp_path, monkeypatch, spelling):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(spelling, "example.org")
    made = processes.environment(tmp_path / "home")
    assert made["FLWR_HOME"] == str(tmp_path / "home")
    assert made["no_proxy"] == made["NO_PROXY"] == "example.org,127.0.0.1,localhost"


@pytest.fixture
def start(tmp_path):
    started = []

    def run(code: str, folder=tmp_path) -> int:
        log = tmp_path / f"{time.monotonic_ns()}.log"
        command = [sys.executable, "-c", code]
        started.append(processes.start(command, folder, log, dict(os.environ)))
        wait_until(lambda: "up" in log.read_text(), step_s=0.01)
        return started[-1].pid

    yield run
    processes.end(tmp_path, grace_s=0.0)
    for process in started:
        process.wait()


def test_end_finds_children_in_other_sessions(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    pid = start(WITH_CHILD)
    stranger = start(SLEEP, other)
    wait_until(lambda: len(processes.find(tmp_path)) >= 2, step_s=0.01)
    assert pid in processes.find(tmp_path)
    processes.signal_one(stranger, tmp_path, signal.SIGKILL)
    assert processes.end(tmp_path) == 2
    assert processes.find(tmp_path) == []
    assert processes.has_tag(stranger, other)
    assert processes.end(other) == 1


def test_end_reaches_deaf_and_stopped_processes(start, tmp_path):
    stopped = start(SLEEP)
    os.kill(stopped, signal.SIGSTOP)
    processes.signal_one(stopped, tmp_path, signal.SIGTERM)
    wait_until(lambda: not processes.has_tag(stopped, tmp_path), step_s=0.01)
    start(DEAF)
    assert processes.end(tmp_path, grace_s=0.3) == 1
    assert processes.find(tmp_path) == []


def test_ended_process_has_no_tag(start, tmp_path):
    pid = start("print('up', flush=True)")
    wait_until(lambda: not processes.has_tag(pid, tmp_path), step_s=0.01)
    for no_process in (pid, 0, -1):
        processes.signal_one(no_process, tmp_path, signal.SIGKILL)


SUPERNODE = """
import threading, time
from flwr_hetero.fleet import supernode

def flower_supernode(name):
    threading.Thread(target=time.sleep, args=(300,)).start()
    raise OSError("certificate has expired")

supernode._flwr.run_command = flower_supernode
supernode.main([])
"""


def test_supernode_ends_with_its_loop():
    command = [sys.executable, "-c", SUPERNODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGTERM  # Flower's handler makes a 0 of it
    assert "OSError: certificate has expired" in done.stderr
