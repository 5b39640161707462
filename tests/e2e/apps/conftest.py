"""A Flower of its own for `flwr run`: own home, own ports, ended by the tag of its processes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flwr_hetero.fleet import processes

APPS = Path(__file__).parents[3] / "apps"


@pytest.fixture(scope="session")
def flower(tmp_path_factory):
    """Give a function that runs an app to its end and returns what it printed.

    A run takes a minute or two; only a hang reaches the time-out.
    """
    home = tmp_path_factory.mktemp("flower-home")
    ports = processes.free_ports(2)
    environment = os.environ | {
        processes.TAG: str(home),
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "PATH": f"{processes.BIN}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }

    def run(app: str, num_nodes: int, **config: object) -> str:
        settings = " ".join(f"{k.replace('_', '-')}={toml(v)}" for k, v in config.items())
        federation = f"num-supernodes={num_nodes} client-resources-num-cpus=1"
        command = [processes.BIN / "flwr", "run", APPS / app, "--stream", "--run-config", settings]
        command += ["--federation-config", federation]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=1800, check=False
        )
        return done.stdout + done.stderr

    yield run
    processes.end(home)
    shutil.rmtree(home, ignore_errors=True)


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, (str, Path)) else str(value)
