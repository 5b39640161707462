"""Flower's command line, called for a fleet on this machine: runs, registration, who is online."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import invalid
from flwr_hetero.fleet import processes as commands
from flwr_hetero.fleet import processes as marked
from flwr_hetero.fleet.fleet_file import DRAFT, FILE, FleetFile, Node, nodes_of

ANSWER_S = 60.0
"""Seconds that the SuperLink may take to say who is online."""


NODES = "nodes.json"
"""In the fleet's ``FLWR_HOME``: the names of registered node ids."""


class FlowerCli:
    """Call ``flwr`` against the SuperLink of a fleet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def flwr(self, *arguments: str, timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
        """Run Flower's command line against this fleet."""
        return subprocess.run(
            [str(commands.BIN / "flwr"), *arguments],
            env=commands.environment(self.folder / "home"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run_line(self, app: str = "apps/tifl") -> str:
        """Return the shell line that runs an app on this fleet."""
        settings = {"FLWR_HOME": str(self.folder / "home")}
        if commands.is_behind_proxy():
            settings["no_proxy"] = commands.no_proxy()["no_proxy"]
        words = " ".join(f"{name}={quote(value)}" for name, value in settings.items())
        return f"{words} flwr run {quote(app)} {commands.CONNECTION} --stream"

    def online(self) -> set[str]:
        """Ask the SuperLink which SuperNodes are online."""
        ask = ("supernode", "list", commands.CONNECTION, "--format", "json")
        try:
            ids = json.loads((self.folder / "home" / NODES).read_text(encoding="utf-8"))
            listed = json.loads(self.flwr(*ask, timeout_s=ANSWER_S).stdout)["nodes"]
        except (FileNotFoundError, subprocess.TimeoutExpired, ValueError, KeyError):
            return set()
        here = [node["node-id"] for node in listed if node["status"] == "online"]
        return {ids[node_id] for node_id in here if node_id in ids}

    def register(self, nodes: Sequence[Node], timeout_s: float = 120.0) -> None:
        """Tell the SuperLink the public keys of SuperNodes, and keep the ids that it gives them."""
        ids = {}
        for node in nodes:
            key = str(self.folder / "keys" / f"{node.name}.pub")
            register = ("supernode", "register", key, commands.CONNECTION, "--name", node.name)
            try:
                done = self.flwr(*register, "--format", "json", timeout_s=timeout_s)
                ids[str(json.loads(done.stdout)["node-id"])] = node.name
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{node.name} cannot be registered: {error}") from error
            except (ValueError, KeyError) as error:
                text = f"{node.name} cannot be registered:\n{done.stdout}{done.stderr}"
                raise RuntimeError(text) from error
        (self.folder / "home" / NODES).write_text(json.dumps(ids), encoding="utf-8")


START_S = 120.0
"""Seconds that a process may take to come up."""


END_S = 30.0
"""Seconds that a process may take to end."""


_OWN = (
    *("keys", "home", "homes", "logs"),
    *("state.db", "state.db-wal", "state.db-shm"),  # the last two after a hard end
    *(FILE, DRAFT),
)


class RealFleet(FlowerCli):
    """Start, look at and end a fleet of real Flower processes.

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
        super().__init__(folder)
        self.settings = dict(settings or {})

    @property
    def file(self) -> FleetFile:
        """What the fleet consists of, as last saved."""
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

        Parameters
        ----------
        profiles : sequence of DeviceProfile
            One per SuperNode. ``compute_factor`` becomes a share of one CPU, link speeds are
            kept, the rest does not apply to real processes.
        cpu : float
            Share of one CPU that the fastest gets, in (0, 1]. Shares hold only as long as all of
            them together fit into the machine.
        database : bool
            Keep the SuperLink's state in a file, so that it survives a restart.
        say : callable
            Told what happens.

        Raises
        ------
        ValueError
            If there is no profile, ``cpu`` is out of range, or the folder is not empty.
        RuntimeError
            If something does not start; its log is quoted, and what was started is ended.
        """
        if not profiles:
            raise invalid("profiles", profiles, "hold at least one device", "pass one per node")
        if self.folder.exists() and any(self.folder.iterdir()):
            cure = "end the fleet in it with `down`, or choose another"
            raise invalid("dir", str(self.folder), "be empty or new", cure)
        limits = nodes_of(list(profiles), cpu)
        port, *ports = commands.free_ports(1 + 2 * len(limits))
        nodes = [
            replace(node, port=ports.pop(), link_port=ports.pop() if node.has_link else 0)
            for node in limits
        ]
        fleet = FleetFile(port=port, database=database, nodes=nodes)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        fleet.save(self.folder)  # first, so that `down` can end whatever comes after
        try:
            commands.prepare(self.folder, fleet)
            say("starting the SuperLink")
            self.start_superlink()
            say(f"registering {len(nodes)} SuperNodes")
            self.register(nodes)
            say("starting them and waiting until they are online")
            self._start_warden()
            for node in nodes:
                self.start_node(node.name)
            self.wait_online([node.name for node in nodes])
        except BaseException:
            marked.end(self.folder)
            raise

    def start_superlink(self) -> None:
        """Start the SuperLink, also again after it was ended, and wait until it listens.

        Raises
        ------
        RuntimeError
            If it ends or does not listen in time.
        """
        fleet = self.file
        pid = self._start("superlink", commands.superlink_command(self.folder, fleet))
        replace(fleet, superlink_pid=pid).save(self.folder)
        deadline_s = time.monotonic() + START_S
        while not commands.listens(fleet.port):
            if not self.is_alive(pid) or time.monotonic() > deadline_s:
                raise self._failure("superlink")
            time.sleep(0.1)

    def start_node(self, name: str) -> None:
        """Start a SuperNode, also again after it was ended: its key makes it the same node.

        Parameters
        ----------
        name : str
            As in the fleet's file.
        """
        fleet = self.file
        node = fleet.node(name)
        pid = self._start(name, commands.supernode_command(self.folder, fleet, node))
        fleet.with_node(replace(node, pid=pid)).save(self.folder)

    def wait_online(self, names: Collection[str], timeout_s: float = START_S) -> None:
        """Wait until SuperNodes are online.

        Parameters
        ----------
        names : collection of str
            Which.
        timeout_s : float
            Seconds to wait.

        Raises
        ------
        RuntimeError
            If one or the SuperLink ends, or time is up; its log is quoted.
        """
        deadline_s = time.monotonic() + timeout_s
        while missing := sorted(set(names) - self.online()):
            if not self.is_alive(self.file.superlink_pid):
                raise self._failure("superlink")
            gone = [name for name in missing if not self.is_alive(self.file.node(name).pid)]
            if gone or time.monotonic() > deadline_s:
                raise self._failure((gone or missing)[0])
            time.sleep(0.5)

    def is_alive(self, pid: int) -> bool:
        """Tell whether a process is alive and one of this fleet.

        Parameters
        ----------
        pid : int
            From the fleet's file.

        Returns
        -------
        bool
            False if it ended, also if its number now belongs to another process.
        """
        return marked.has_mark(pid, self.folder)

    def end_process(self, pid: int, signal_number: int = signal.SIGKILL) -> None:
        """End one process of the fleet and wait until it is gone.

        Parameters
        ----------
        pid : int
            From the fleet's file; passed over if it is no longer of this fleet.
        signal_number : int
            How; by default without any chance to say goodbye.
        """
        marked.end_one(pid, self.folder, signal_number)
        deadline_s = time.monotonic() + END_S
        while self.is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        marked.collect()

    def wake(self) -> None:
        """Let processes run on that a warden had stopped before it was killed."""
        for pid in marked.find(self.folder):
            marked.end_one(pid, self.folder, signal.SIGCONT)

    def down(self, *, keep: bool = False) -> int:
        """End every process of the fleet and remove its files; nothing else is touched.

        Parameters
        ----------
        keep : bool
            Leave the files, to read the logs.

        Returns
        -------
        int
            Number of processes ended.

        Raises
        ------
        ValueError
            If there is no fleet in the folder.
        """
        if not (self.folder / DRAFT).exists():  # its end came while the file was written
            FleetFile.load(self.folder)
        ended = marked.end(self.folder)
        if not keep:
            for path in (self.folder / name for name in _OWN):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        return ended

    def _start_warden(self) -> None:
        fleet = self.file
        if fleet.needs_warden:
            command = [sys.executable, "-m", "flwr_hetero.fleet.throttle", str(self.folder)]
            replace(fleet, warden_pid=self._start("warden", command)).save(self.folder)

    def _start(self, name: str, command: list[str]) -> int:
        environment = commands.environment(self.folder / "homes" / name) | self.settings
        return marked.start(command, self.folder, self.folder / "logs" / f"{name}.log", environment)

    def _failure(self, name: str) -> RuntimeError:
        log = self.folder / "logs" / f"{name}.log"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return RuntimeError(f"{name} did not come up. The end of {log}:\n{tail}")
