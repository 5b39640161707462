"""A real fleet on this machine: a SuperLink and SuperNodes with TLS, keys and limits."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isinf
from pathlib import Path
from shlex import quote

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_number, invalid
from flwr_hetero.fleet import processes
from flwr_hetero.fleet.linux import check_linux
from flwr_hetero.fleet.processes import FILE, FleetFile, SuperNodeSpec, no_proxy

# seconds that a process may take to come up, to end, and to list the nodes online
START_S, END_S, ANSWER_S = 120.0, 30.0, 60.0
# in the fleet's FLWR_HOME: the names of registered node ids, which the SuperLink does not list
NODES = "nodes.json"
# the database leaves the last two behind after a hard end
OWN = ("keys", "home", "homes", "logs", FILE, "state.db", "state.db-wal", "state.db-shm")


class RealFleet:
    """Start, inspect and end a fleet of real Flower processes.

    Parameters
    ----------
    folder : Path
        Of the fleet alone: keys, logs, and a ``FLWR_HOME`` for each process, so that neither
        ``~/.flwr`` nor another fleet is touched.
    settings : mapping of str to str, optional
        Environment variables for all its processes.

    Examples
    --------
    >>> from flwr_hetero.fleet import named_fleet
    >>> fleet = RealFleet(Path("~/flwr-hetero-fleet").expanduser())
    >>> fleet.up(named_fleet("uniform", 2))     # doctest: +SKIP
    >>> fleet.flwr("run", "apps/tifl", "fleet") # doctest: +SKIP
    >>> fleet.down()                            # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self.settings = Path(folder).resolve(), dict(settings or {})

    @property
    def file(self) -> FleetFile:
        """The fleet's file, as last saved."""
        return FleetFile.load(self.folder)

    def up(
        self,
        profiles: Sequence[DeviceProfile],
        *,
        cpu: float = 1.0,
        database: bool = False,
        warm: bool = True,
    ) -> None:
        """Make keys, start everything, register the SuperNodes, wait until all are online.

        Each profile is a SuperNode: speeds become shares of one CPU, of which the fastest gets
        ``cpu`` in (0, 1], link speeds are kept. With ``database`` the SuperLink's state survives a
        restart. Unless ``warm``, each message starts a new process, as in Flower's own nodes.
        ValueError for bad arguments or a folder that is not empty; RuntimeError with its log if
        something does not start, or on another system than Linux.
        """
        check_linux("a real fleet")
        check_number("cpu", cpu, "(0, 1]")
        if self.folder.exists() and any(self.folder.iterdir()):
            hint = "end the fleet in it with `down`, or choose another"
            raise invalid("dir", str(self.folder), "be empty or new", hint)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        port, *ports = processes.free_ports(1 + 2 * len(profiles))
        nodes = specs_of(profiles, cpu, ports)
        fleet = FleetFile(port, database, warm, nodes=nodes)
        # first, so that `down` can end all that comes after
        fleet.save(self.folder)
        try:
            processes.prepare(self.folder, fleet)
            self.start_superlink()
            self._register(nodes)
            if fleet.needs_throttle:
                command = [sys.executable, "-m", "flwr_hetero.fleet.throttle", str(self.folder)]
                pid = self._start("throttle", command)
                replace(self.file, throttle_pid=pid).save(self.folder)
            for node in nodes:
                self.start_node(node.name)
            self.wait_online([node.name for node in nodes])
        except BaseException:
            processes.end(self.folder)
            raise

    def _register(self, nodes: Sequence[SuperNodeSpec]) -> None:
        """Register the public keys of SuperNodes, and keep the ids that the SuperLink gives."""
        ids = {}
        for node in nodes:
            key = str(self.folder / "keys" / f"{node.name}.pub")
            register = ("supernode", "register", key, processes.CONNECTION, "--name", node.name)
            done = self.flwr(*register, "--format", "json", timeout_s=START_S)
            try:
                ids[str(json.loads(done.stdout)["node-id"])] = node.name
            except (ValueError, KeyError) as error:
                text = f"{node.name} cannot be registered:\n{done.stdout}{done.stderr}"
                raise RuntimeError(text) from error
        (self.folder / "home" / NODES).write_text(json.dumps(ids), encoding="utf-8")

    def start_superlink(self) -> None:
        """Start the SuperLink, also again after it was ended, and wait until it listens."""
        fleet = self.file
        pid = self._start("superlink", processes.superlink_command(self.folder, fleet))
        replace(fleet, superlink_pid=pid).save(self.folder)
        deadline_s = time.monotonic() + START_S
        while not processes.listens(fleet.port):
            if not self.is_alive(pid) or time.monotonic() > deadline_s:
                raise self._failure("superlink")
            time.sleep(0.1)

    def start_node(self, name: str) -> None:
        """Start a SuperNode, also again after it was ended: its key makes it the same node."""
        fleet = self.file
        node = fleet.node(name)
        pid = self._start(name, processes.supernode_command(self.folder, fleet, node))
        nodes = [replace(node, pid=pid) if each == node else each for each in fleet.nodes]
        replace(fleet, nodes=nodes).save(self.folder)

    def _start(self, name: str, command: list[str]) -> int:
        environment = processes.environment(self.folder / "homes" / name) | self.settings
        return processes.start(command, self.folder, self._log(name), environment)

    def wait_online(self, names: Collection[str], timeout_s: float = START_S) -> None:
        """Wait until the SuperNodes of these names are online; RuntimeError if one is not."""
        deadline_s = time.monotonic() + timeout_s
        while missing := sorted(set(names) - self.online()):
            if not self.is_alive(self.file.superlink_pid):
                raise self._failure("superlink")
            gone = [name for name in missing if not self.is_alive(self.file.node(name).pid)]
            if gone or time.monotonic() > deadline_s:
                raise self._failure((gone or missing)[0])
            time.sleep(0.5)

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _failure(self, name: str) -> RuntimeError:
        tail = self._log(name).read_text(encoding="utf-8", errors="replace")[-2000:]
        return RuntimeError(f"{name} did not come up. The end of {self._log(name)}:\n{tail}")

    def flwr(self, *arguments: str, timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
        """Run Flower's command line against this fleet."""
        command = [str(processes.BIN / "flwr"), *arguments]
        home = processes.environment(self.folder / "home")
        return subprocess.run(command, env=home, capture_output=True, text=True, timeout=timeout_s)

    def run_line(self) -> str:
        """Return a shell line that runs TiFL on this fleet, with settings for its size."""
        # behind a proxy Flower would look for this machine's own address there
        words = f"FLWR_HOME={quote(str(self.folder / 'home'))} no_proxy={quote(no_proxy())}"
        count = len(self.file.nodes)
        num_tiers = min(5, count if count < 6 else count // 2)
        keys = f"fleet='real' num-tiers={num_tiers} clients-per-round={min(3, count // num_tiers)}"
        return f'{words} flwr-hetero run apps/tifl {processes.CONNECTION} --run-config "{keys}"'

    def online(self) -> set[str]:
        """Ask the SuperLink which SuperNodes are online."""
        ask = ("supernode", "list", processes.CONNECTION, "--format", "json")
        try:
            ids = json.loads((self.folder / "home" / NODES).read_text(encoding="utf-8"))
            listed = json.loads(self.flwr(*ask, timeout_s=ANSWER_S).stdout)["nodes"]
        # before registration, or while the SuperLink starts or is busy
        except (FileNotFoundError, subprocess.TimeoutExpired, ValueError, KeyError):
            return set()
        here = [node["node-id"] for node in listed if node["status"] == "online"]
        return {ids[node_id] for node_id in here if node_id in ids}

    def is_alive(self, pid: int) -> bool:
        """Return whether a process is alive and one of this fleet."""
        return processes.has_tag(pid, self.folder)

    def end_process(self, pid: int, signal_number: int | None = None) -> None:
        """End one process of the fleet, by SIGKILL if no other signal is given, and wait for it."""
        processes.signal_one(pid, self.folder, signal_number or signal.SIGKILL)
        deadline_s = time.monotonic() + END_S
        while self.is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        processes.collect()

    def down(self, *, keep: bool = False) -> int:
        """End every process of the fleet, and remove its files; return how many have ended."""
        if not (self.folder / FILE).is_file():
            raise invalid("dir", str(self.folder), "hold a fleet")
        ended = processes.end(self.folder)
        if not keep:
            for path in (self.folder / name for name in OWN):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        return ended


def specs_of(
    profiles: Sequence[DeviceProfile], cpu: float, ports: Sequence[int]
) -> list[SuperNodeSpec]:
    """Turn device profiles into limits for SuperNodes on this machine; two ports for each."""
    fastest, specs = max(profile.compute_factor for profile in profiles), []
    for i, profile in enumerate(profiles):
        share = cpu * (profile.compute_factor / fastest)
        links = profile.uplink_mbps, profile.downlink_mbps
        relay_port = 0 if isinf(min(links)) else ports[2 * i + 1]
        specs.append(SuperNodeSpec(f"node-{i}", share, *links, ports[2 * i], relay_port))
    return specs
