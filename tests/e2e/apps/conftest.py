"""A Flower of its own for `flwr run`: own home, own ports, ended by process id."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

APPS = Path(__file__).parents[3] / "apps"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes_of(home: Path) -> list[int]:
    """Find the processes that were started with this FLWR_HOME."""
    marker = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker in environment:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def flower(tmp_path_factory):
    """Give a function that runs an app to its end and returns what it printed.

    A run takes a minute or two; only a hang reaches the time-out.
    """
    home = tmp_path_factory.mktemp("flower-home")
    bin_dir = Path(sys.executable).parent
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }

    def run(app: str, num_supernodes: int = 2, timeout: float = 1800, **config: object) -> str:
        settings = " ".join(
            f"{key.replace('_', '-')}={toml(value)}" for key, value in config.items()
        )
        command = [str(bin_dir / "flwr"), "run", str(APPS / app), "--stream"]
        if settings:
            command += ["--run-config", settings]
        if num_supernodes != 2:
            federation = f"num-supernodes={num_supernodes} client-resources-num-cpus=1"
            command += ["--federation-config", federation]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        return done.stdout + done.stderr

    yield run
    end(home)
    shutil.rmtree(home, ignore_errors=True)


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, (str, Path)) else str(value)


def end(home: Path) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(home):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while processes_of(home) and time.monotonic() < deadline:
            time.sleep(0.2)
