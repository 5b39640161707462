"""Files and processes of a real fleet: its description, commands, and the tag of its processes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from flwr_hetero.errors import invalid
from flwr_hetero.files import replace
from flwr_hetero.fleet import certificates
from flwr_hetero.fleet.certificates import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY

FILE = "fleet.json"
HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
BIN = Path(sys.executable).parent
CONNECTION = "fleet"  # name of the SuperLink in the Flower configuration of a fleet
TAG = "FLWR_HETERO_FLEET"  # environment variable of all processes of a fleet: its folder
GRACE_S = 6.0  # seconds between SIGTERM and SIGKILL; Flower gives a ServerApp 5


@dataclass(frozen=True)
class SuperNodeSpec:
    """Limits, ports and process of a SuperNode. Only a limited link has a relay."""

    name: str
    cpu: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    port: int = 0
    relay_port: int = 0
    pid: int = 0


@dataclass(frozen=True)
class FleetFile:
    """The description of a fleet, kept in its folder."""

    port: int
    database: bool = False
    warm: bool = True
    superlink_pid: int = 0
    throttle_pid: int = 0
    nodes: list[SuperNodeSpec] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Address of the SuperLink in Flower's form."""
        return f"{HOST}:{self.port}"

    @property
    def needs_throttle(self) -> bool:
        """Whether any node has a limited CPU or link."""
        return any(node.cpu < 1 or node.relay_port for node in self.nodes)

    def node(self, name: str) -> SuperNodeSpec:
        """Return the node of a name; KeyError if there is none."""
        return {node.name: node for node in self.nodes}[name]

    def save(self, folder: Path) -> None:
        """Write the file, in one step."""
        replace(folder / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> "FleetFile":
        """Read the file."""
        if not (folder / FILE).is_file():
            raise invalid("dir", str(folder), "hold a fleet", "start one with `up`")
        stored: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return cls(**stored | {"nodes": [SuperNodeSpec(**node) for node in stored["nodes"]]})


def prepare(folder: Path, fleet: FleetFile) -> None:
    """Fill the folder of a fleet: keys, certificates and Flower's configuration."""
    for name in ("logs", "home", "homes"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    keys = folder / "keys"
    certificates.make_authority(keys)
    certificates.make_server_certificate(keys, [HOST, "localhost"])
    for node in fleet.nodes:
        certificates.make_node_key(keys, node.name)
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{fleet.address}"\nroot-certificates = "{keys / CA_CERTIFICATE}"\n',
        encoding="utf-8",
    )


def superlink_command(folder: Path, fleet: FleetFile) -> list[str]:
    """Return the command of the SuperLink: TLS, authentication of SuperNodes, no installing."""
    keys = folder / "keys"
    command = [
        *(str(BIN / "flower-superlink"), "--host", HOST, "--port", str(fleet.port)),
        *("--ssl-ca-certfile", str(keys / CA_CERTIFICATE)),
        *("--ssl-certfile", str(keys / SERVER_CERTIFICATE)),
        *("--ssl-keyfile", str(keys / SERVER_KEY)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    if fleet.database:
        command += ["--database", str(folder / "state.db")]
    return command


def supernode_command(folder: Path, fleet: FleetFile, node: SuperNodeSpec) -> list[str]:
    """Return the command of a SuperNode; its partition is its position in the fleet."""
    keys = folder / "keys"
    partition = fleet.nodes.index(node)
    return [
        *(sys.executable, "-m", "flwr_hetero.fleet.supernode"),
        *(() if fleet.warm else ("--cold",)),
        *("--superlink", f"{HOST}:{node.relay_port or fleet.port}"),
        *("--root-certificates", str(keys / CA_CERTIFICATE)),
        *("--auth-supernode-private-key", str(keys / node.name)),
        *("--port", str(node.port)),
        *("--node-config", f"partition-id={partition} num-partitions={len(fleet.nodes)}"),
    ]


def environment(home: Path) -> dict[str, str]:
    """Return environment variables that keep Flower in its home folder and off the network."""
    home.mkdir(mode=0o700, exist_ok=True)
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        **dict.fromkeys(("no_proxy", "NO_PROXY"), no_proxy()),
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def no_proxy() -> str:
    """Return the hosts that are reached without a proxy, with this machine among them."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return ",".join(filter(None, [hosts, HOST, "localhost"]))


def free_ports(count: int) -> list[int]:
    """Find unused ports of the loopback interface."""
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    return list(islice((port for port in ports if not listens(port)), count))


def listens(port: int) -> bool:
    """Return whether a process listens on a port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def start(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a process with a fleet's tag. It outlives this one."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, TAG: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # A new process has no environment, and thus no tag, for some milliseconds.
    while process.poll() is None and not has_tag(process.pid, folder):
        time.sleep(0.001)
    return process


def find(folder: Path) -> list[int]:
    """Return the ids of the processes with a fleet's tag."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if has_tag(pid, folder)]


def has_tag(pid: int, folder: Path) -> bool:
    """Return whether a process is alive and belongs to a fleet."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{TAG}={folder}".encode() in variables


def end(folder: Path, grace_s: float = GRACE_S) -> int:
    """End all processes of a fleet; return how many there were."""
    signalled: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    # The loop also reaches processes that are started meanwhile.
    while pids := set(find(folder)):
        is_late = time.monotonic() > deadline_s
        for pid in pids if is_late else pids - signalled:
            signal_one(pid, folder, signal.SIGKILL if is_late else signal.SIGTERM)
        signalled |= pids
        time.sleep(0.1)
    return len(signalled)


def signal_one(pid: int, folder: Path, signal_number: int) -> None:
    """Send a signal to one process of a fleet, and continue it if it was stopped."""
    # The system may have given the id of an ended process to a stranger.
    if has_tag(pid, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
            os.kill(pid, signal.SIGCONT)
