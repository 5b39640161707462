"""A real fleet on this machine: a SuperLink and SuperNodes with TLS, keys and limits."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isinf
from pathlib import Path
from shlex import quote
from urllib.request import getproxies, proxy_bypass

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_number, invalid
from flwr_hetero.fleet import certificates, processes
from flwr_hetero.fleet.processes import DRAFT, FILE, HOST, FleetFile, SuperNodeSpec

START_S, END_S, ANSWER_S = 120.0, 30.0, 60.0
"""Seconds that a process may take to come up, to end, and to list the nodes online."""
NODES = "nodes.json"
"""In the fleet's ``FLWR_HOME``: the names of registered node ids."""
# the database leaves the last two behind after a hard end
OWN = ("keys", "home", "homes", "logs", FILE, DRAFT, "state.db", "state.db-wal", "state.db-shm")


class RealFleet:
    """Start, inspect and end a fleet of real Flower processes.

    Everything lies in one folder: keys, logs, and a ``FLWR_HOME`` for each process, so that
    neither ``~/.flwr`` nor another fleet is touched. Ports are free ones of the loopback
    interface.

    Parameters
    ----------
    folder : Path
        The fleet's folder.
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

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self.settings = folder.resolve(), dict(settings or {})

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
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Make keys, start everything, register the SuperNodes, wait until all are online.

        Each profile is a SuperNode: speeds become shares of one CPU, of which the fastest gets
        ``cpu`` in (0, 1], link speeds are kept. With ``database`` the SuperLink's state survives a
        restart. ``say`` is called with a line per step. ValueError for bad arguments or a folder
        that is not empty; RuntimeError with its log if something does not start.
        """
        if not profiles:
            raise invalid("profiles", profiles, "hold at least one device")
        check_number("cpu", cpu, "(0, 1]")
        self._claim()
        port, *ports = processes.free_ports(1 + 2 * len(profiles))
        nodes = specs_of(profiles, cpu, ports)
        fleet = FleetFile(port=port, database=database, nodes=nodes)
        # first, so that `down` can end all that comes after
        fleet.save(self.folder)
        try:
            processes.prepare(self.folder, fleet)
            say("starting the SuperLink")
            self.start_superlink()
            say(f"registering {len(nodes)} SuperNodes")
            self._register(nodes)
            say("starting them and waiting until they are online")
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

    def _claim(self) -> None:
        """Take the folder; of two that want it at once one is refused."""
        # its file is made, not written over: both may have seen that the folder is empty
        with suppress(FileExistsError):
            if not self.folder.exists() or not any(self.folder.iterdir()):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.folder.chmod(0o700)
                (self.folder / FILE).touch(exist_ok=False)
                return
        hint = "end the fleet in it with `down`, or choose another"
        raise invalid("dir", str(self.folder), "be empty or new", hint)

    def _register(self, nodes: Sequence[SuperNodeSpec]) -> None:
        """Register the public keys of SuperNodes, and keep the ids that the SuperLink gives."""
        ids, said = {}, ""
        for node in nodes:
            key = str(self.folder / "keys" / f"{node.name}.pub")
            register = ("supernode", "register", key, processes.CONNECTION, "--name", node.name)
            try:
                done = self.flwr(*register, "--format", "json", timeout_s=START_S)
                said = f"\n{done.stdout}{done.stderr}"
                ids[str(json.loads(done.stdout)["node-id"])] = node.name
            except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
                text = f"{node.name} cannot be registered: {error}{said}"
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
        """Start a SuperNode, also again after it was ended."""
        # its key makes it the same node for the SuperLink
        fleet = self.file
        node = fleet.node(name)
        pid = self._start(name, processes.supernode_command(self.folder, fleet, node))
        fleet.with_node(replace(node, pid=pid)).save(self.folder)

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
        return subprocess.run(
            [str(processes.BIN / "flwr"), *arguments],
            env=processes.environment(self.folder / "home"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run_line(self) -> str:
        """Return a shell line that runs TiFL on this fleet, with settings for its size."""
        # behind a proxy Flower would look for this machine's own address there
        settings = {"FLWR_HOME": str(self.folder / "home")}
        if getproxies().keys() - {"no"} and not proxy_bypass(HOST):
            settings["no_proxy"] = processes.no_proxy()["no_proxy"]
        words = " ".join(f"{name}={quote(value)}" for name, value in settings.items())
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

    def expiring(self) -> list[str]:
        """Say which certificates have expired or will soon."""
        return certificates.expiring(self.folder / "keys")

    def is_alive(self, pid: int) -> bool:
        """Return whether a process is alive and one of this fleet."""
        return processes.has_tag(pid, self.folder)

    def end_process(self, pid: int, signal_number: int = signal.SIGKILL) -> None:
        """End one process of the fleet and wait until it is gone; others are not touched."""
        processes.signal_one(pid, self.folder, signal_number)
        deadline_s = time.monotonic() + END_S
        while self.is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        processes.collect()

    def resume_stopped(self) -> None:
        """Continue processes that a throttle had stopped before it was killed."""
        for pid in processes.find(self.folder):
            processes.signal_one(pid, self.folder, signal.SIGCONT)

    def down(self, *, keep: bool = False) -> int:
        """End every process of the fleet; remove its files, unless they are to be kept.

        Returns how many have ended; nothing else is touched.
        """
        if not any((self.folder / name).is_file() for name in (FILE, DRAFT)):
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
    for number, profile in enumerate(profiles):
        port, relay_port = ports[2 * number : 2 * number + 2]
        share, links = (
            profile.compute_factor / fastest,
            (profile.uplink_mbps, profile.downlink_mbps),
        )
        relay_port = 0 if isinf(min(links)) else relay_port
        specs.append(SuperNodeSpec(f"node-{number}", cpu * share, *links, port, relay_port))
    return specs
