"""A real fleet on this machine: a SuperLink and SuperNodes with TLS, keys and limits."""

import json
import logging
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
from flwr_hetero.fleet.linux import why_not_here
from flwr_hetero.fleet.processes import FILE, FleetFile, SuperNodeSpec, no_proxy

START_S = 120.0  # limit for a process to start
END_S = 30.0  # limit for a process to end
LIST_S = 60.0  # limit for the SuperLink to list the SuperNodes
NODES = "nodes.json"
"""File in the fleet's FLWR_HOME: names by node id, which the SuperLink does not list."""
FILES = ("keys", "home", "homes", "logs", FILE, "state.db", "state.db-wal", "state.db-shm")
"""All that a fleet has in its folder. SIGKILL leaves the last two beside the database."""

_log = logging.getLogger("flwr")


class RealFleet:
    """Start, inspect and end a fleet of real Flower processes.

    Parameters
    ----------
    folder : Path
        Folder of this fleet alone, with its keys, logs, and a ``FLWR_HOME`` for each process.
        Neither ``~/.flwr`` nor another fleet is touched.
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
        self.folder = Path(folder).resolve()
        self.settings = dict(settings or {})
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def file(self) -> FleetFile:
        """The description of the fleet, as last saved."""
        return FleetFile.load(self.folder)

    def up(
        self,
        profiles: Sequence[DeviceProfile],
        *,
        cpu: float = 1.0,
        database: bool = False,
        warm: bool = True,
    ) -> None:
        """Make keys, start all processes, register the SuperNodes, wait until all are online.

        Each profile becomes a SuperNode with the link speeds of the profile and a share of one CPU.
        The fastest gets ``cpu``, in (0, 1], and the others in proportion. With ``database``, the
        state of the SuperLink survives a restart. Without ``warm``, each message starts a new
        process, as in Flower's own nodes. ValueError for bad arguments or a folder that is not
        empty. RuntimeError on other systems than Linux, or, with the end of the log, if a process
        does not start.
        """
        reason = why_not_here()
        if reason:
            hint = "LocalGrid emulates a fleet anywhere."
            raise RuntimeError(f"a real fleet cannot run here: {reason}. {hint}")
        check_number("cpu", cpu, "(0, 1]")
        if self.folder.exists() and any(self.folder.iterdir()):
            hint = "end the fleet in it with `down`, or choose another"
            raise invalid("dir", str(self.folder), "be empty or new", hint)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        port, *ports = processes.free_ports(1 + 2 * len(profiles))
        nodes = specs_of(profiles, cpu, ports)
        fleet = FleetFile(port, database, warm, nodes=nodes)
        # Save the file first, so that `down` can end whatever has been started.
        fleet.save(self.folder)
        try:
            processes.prepare(self.folder, fleet)
            _log.info("Keys and certificates are in %s", self.folder / "keys")
            _log.info("Starting the SuperLink at https://%s", fleet.address)
            self.start_superlink()
            self._register(nodes)
            if fleet.needs_throttle:
                command = [sys.executable, "-m", "flwr_hetero.fleet.throttle", str(self.folder)]
                pid = self._start("throttle", command)
                replace(self.file, throttle_pid=pid).save(self.folder)
            for node in nodes:
                _log.info("Starting %s", node.name)
                self.start_node(node.name)
            _log.info("Waiting until all SuperNodes are online")
            self.wait_online([node.name for node in nodes])
        except BaseException:
            self.down(keep=True)
            raise

    def _register(self, nodes: Sequence[SuperNodeSpec]) -> None:
        """Register the public keys of SuperNodes, and save the node ids from the SuperLink."""
        ids = {}
        for node in nodes:
            _log.info("Registering %s", node.name)
            key = str(self.folder / "keys" / f"{node.name}.pub")
            register = ("supernode", "register", key, processes.CONNECTION, "--name", node.name)
            done = self.flwr(*register, "--format", "json", timeout_s=START_S)
            try:
                ids[str(json.loads(done.stdout)["node-id"])] = node.name
            except (ValueError, KeyError) as error:
                reason = f"{node.name} cannot be registered:\n{done.stdout}{done.stderr}"
                raise RuntimeError(reason) from error
        (self.folder / "home" / NODES).write_text(json.dumps(ids), encoding="utf-8")

    def start_superlink(self) -> None:
        """Start or restart the SuperLink, and wait until it listens."""
        fleet = self.file
        pid = self._start("superlink", processes.superlink_command(self.folder, fleet))
        replace(fleet, superlink_pid=pid).save(self.folder)
        deadline_s = time.monotonic() + START_S
        while not processes.listens(fleet.port):
            if not self.is_alive(pid) or time.monotonic() > deadline_s:
                raise self._failure("superlink")
            time.sleep(0.1)

    def start_node(self, name: str) -> None:
        """Start or restart a SuperNode, which its key makes the same node as before."""
        fleet = self.file
        node = fleet.node(name)
        pid = self._start(name, processes.supernode_command(self.folder, fleet, node))
        nodes = [replace(node, pid=pid) if other == node else other for other in fleet.nodes]
        replace(fleet, nodes=nodes).save(self.folder)

    def _start(self, name: str, command: list[str]) -> int:
        environment = processes.environment(self.folder / "homes" / name) | self.settings
        process = processes.start(command, self.folder, self._log(name), environment)
        self._started.append(process)
        return process.pid

    def wait_online(self, names: Collection[str]) -> None:
        """Wait until SuperNodes are online; RuntimeError if one ends or is late."""
        deadline_s = time.monotonic() + START_S
        last = -1
        while missing := sorted(set(names) - self.online()):
            if len(missing) != last:
                last = len(missing)
                _log.info("%d of %d SuperNodes are online", len(names) - last, len(names))
            if not self.is_alive(self.file.superlink_pid):
                raise self._failure("superlink")
            ended = [name for name in missing if not self.is_alive(self.file.node(name).pid)]
            if ended or time.monotonic() > deadline_s:
                raise self._failure((ended or missing)[0])
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
        """Return a shell command that runs TiFL on this fleet, with settings for its size."""
        # Behind a proxy, Flower would look for 127.0.0.1 there.
        variables = f"FLWR_HOME={quote(str(self.folder / 'home'))} no_proxy={quote(no_proxy())}"
        count = len(self.file.nodes)
        num_tiers = min(5, count if count < 6 else count // 2)
        clients = min(3, count // num_tiers)
        config = f"fleet='real' num-tiers={num_tiers} clients-per-round={clients}"
        command = f"flwr-hetero run apps/tifl {processes.CONNECTION}"
        return f'{variables} {command} --run-config "{config}"'

    def online(self) -> set[str]:
        """Return the names of the SuperNodes that are online, by the SuperLink."""
        arguments = ("supernode", "list", processes.CONNECTION, "--format", "json")
        try:
            names = json.loads((self.folder / "home" / NODES).read_text(encoding="utf-8"))
            nodes = json.loads(self.flwr(*arguments, timeout_s=LIST_S).stdout)["nodes"]
        # No node is registered yet, or the SuperLink is starting or busy.
        except (FileNotFoundError, subprocess.TimeoutExpired, ValueError, KeyError):
            return set()
        ids = {node["node-id"] for node in nodes if node["status"] == "online"}
        return {name for node_id, name in names.items() if node_id in ids}

    def is_alive(self, pid: int) -> bool:
        """Return whether a process is alive and one of this fleet."""
        return processes.has_tag(pid, self.folder)

    def end_process(self, pid: int, signal_number: int | None = None) -> None:
        """End one process of the fleet, by SIGKILL unless given another signal; wait for it."""
        processes.signal_one(pid, self.folder, signal_number or signal.SIGKILL)
        deadline_s = time.monotonic() + END_S
        while self.is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._collect_ended()

    def down(self, *, keep: bool = False) -> int:
        """End all processes of the fleet; return how many. Remove its files unless ``keep``."""
        if not (self.folder / FILE).is_file():
            raise invalid("dir", str(self.folder), "hold a fleet")
        num_ended = processes.end(self.folder)
        self._collect_ended()
        if not keep:
            for path in (self.folder / name for name in FILES):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        return num_ended

    def _collect_ended(self) -> None:
        """Read the exit status of ended processes, so that none of them stays a zombie."""
        for process in self._started:
            # A process loses its tag a moment before its status can be read.
            if not self.is_alive(process.pid):
                process.wait(END_S)
        self._started = [process for process in self._started if process.returncode is None]


def specs_of(
    profiles: Sequence[DeviceProfile], cpu: float, ports: Sequence[int]
) -> list[SuperNodeSpec]:
    """Turn device profiles into the limits of SuperNodes on this machine, with two ports each."""
    fastest = max(profile.compute_factor for profile in profiles)
    specs = []
    for i, profile in enumerate(profiles):
        share = cpu * (profile.compute_factor / fastest)
        links = (profile.uplink_mbps, profile.downlink_mbps)
        relay_port = 0 if isinf(min(links)) else ports[2 * i + 1]
        specs.append(SuperNodeSpec(f"node-{i}", share, *links, ports[2 * i], relay_port))
    return specs
