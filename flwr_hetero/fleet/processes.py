"""A real fleet on disk and as processes: its file, its commands, a tag to find and end them."""

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
# below those that Linux gives to outgoing connections, which could take one before it is used
PORTS = range(20_000, 32_000)
BIN = Path(sys.executable).parent
# name of the SuperLink connection in the fleet's own Flower configuration
CONNECTION = "fleet"
# environment variable, which children inherit: the folder of the fleet of a process
TAG = "FLWR_HETERO_FLEET"
# seconds between SIGTERM and SIGKILL; Flower gives a ServerApp 5
GRACE_S = 6.0

_started: list["subprocess.Popen[bytes]"] = []


@dataclass(frozen=True)
class SuperNodeSpec:
    """One SuperNode: its limits, ports and process; one whose link is limited has a relay."""

    name: str
    cpu: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    port: int = 0
    relay_port: int = 0
    pid: int = 0


@dataclass(frozen=True)
class FleetFile:
    """A fleet, as ``up`` left it."""

    port: int
    database: bool = False
    warm: bool = True
    superlink_pid: int = 0
    throttle_pid: int = 0
    nodes: list[SuperNodeSpec] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the SuperLink, as Flower wants it."""
        return f"{HOST}:{self.port}"

    @property
    def needs_throttle(self) -> bool:
        """Whether any node has a limit."""
        return any(node.cpu < 1 or node.relay_port for node in self.nodes)

    def node(self, name: str) -> SuperNodeSpec:
        """Find a node."""
        return {node.name: node for node in self.nodes}[name]

    def save(self, folder: Path) -> None:
        """Replace the file in one step."""
        replace(folder / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> "FleetFile":
        """Read the file."""
        if not (folder / FILE).is_file():
            raise invalid("dir", str(folder), "hold a fleet", "start one with `up`")
        stored: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return cls(**stored | {"nodes": [SuperNodeSpec(**node) for node in stored["nodes"]]})


def prepare(folder: Path, fleet: FleetFile) -> None:
    """Make the folder of a fleet: keys, certificates, and Flower's configuration."""
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
    return [
        *(str(BIN / "flower-superlink"), "--host", HOST, "--port", str(fleet.port)),
        *("--ssl-ca-certfile", str(keys / CA_CERTIFICATE)),
        *("--ssl-certfile", str(keys / SERVER_CERTIFICATE)),
        *("--ssl-keyfile", str(keys / SERVER_KEY)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *(("--database", str(folder / "state.db")) if fleet.database else ()),
    ]


def supernode_command(folder: Path, fleet: FleetFile, node: SuperNodeSpec) -> list[str]:
    """Return the command of a SuperNode; its partition is its place in the fleet."""
    keys, partition = folder / "keys", fleet.nodes.index(node)
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
    """Make an environment that keeps Flower in its home and off the network."""
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
    """Name this machine among the hosts that are reached without a proxy."""
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return ",".join(filter(None, [own, HOST, "localhost"]))


def free_ports(count: int) -> list[int]:
    """Find unused ports of the loopback interface."""
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    return list(islice((port for port in ports if not listens(port)), count))


def listens(port: int) -> bool:
    """Return whether a process listens on a port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def start(command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> int:
    """Start a tagged process that stays when this one ends; return its id."""
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
    _started.append(process)
    # for some milliseconds it may have no environment yet, and seem to be none of the fleet
    while process.poll() is None and not has_tag(process.pid, folder):
        time.sleep(0.001)
    return process.pid


def find(folder: Path) -> list[int]:
    """Find the processes that carry a fleet's tag."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if has_tag(pid, folder)]


def has_tag(pid: int, folder: Path) -> bool:
    """Return whether a process is alive and belongs to a fleet."""
    with suppress(OSError):
        return f"{TAG}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def end(folder: Path, grace_s: float = GRACE_S) -> int:
    """End all processes that carry a fleet's tag and wait until they are gone; return how many."""
    asked: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while pids := find(folder):
        # what was started meanwhile is asked as well; whoever is deaf or frozen is killed
        late = time.monotonic() > deadline_s
        for pid in pids if late else set(pids) - asked:
            signal_one(pid, folder, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.1)
    collect()
    return len(asked)


def signal_one(pid: int, folder: Path, signal_number: int) -> None:
    """Send a signal to one process of a fleet, and continue it if it was stopped."""
    # another process may have the id of one that has ended
    if has_tag(pid, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
            os.kill(pid, signal.SIGCONT)


def collect() -> None:
    """Collect ended processes that this one started, so that none is a zombie."""
    for process in _started:
        process.poll()
