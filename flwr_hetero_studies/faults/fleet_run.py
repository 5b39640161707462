"""A run of an app on a real fleet, watched through its history while faults are injected."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr_hetero.fleet import RealFleet, processes
from flwr_hetero.fleet.processes import BIN, CONNECTION, environment
from flwr_hetero_studies.real.throttle import descendants

TOY_APP = Path(__file__).parents[2] / "tests" / "e2e" / "deploy" / "toy_app"
History = list[dict[str, Any]]


class FleetRun:
    """Start an app on a fleet, wait for moments in its run, and read its history."""

    def __init__(self, fleet: RealFleet, folder: Path, app: Path = TOY_APP, /, **config: object):
        self.fleet = fleet
        self.folder = folder
        self.app = app
        self.config = {"output_dir": str(folder), **config}
        self.log = folder.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **changes: object) -> "FleetRun":
        """Submit the run; ``changes`` are added to the config, for instance to resume."""
        # The old process may still wait for the log of a run that was killed.
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        config = {key.replace("_", "-"): value for key, value in (self.config | changes).items()}
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = [BIN / "flwr", "run", self.app, CONNECTION, "--stream", "--run-config", settings]
        home = environment(self.fleet.folder / "home")
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, env=home, stdout=out, stderr=out)
        return self

    def history(self) -> History:
        return read_history(self.folder)

    def round(self) -> int:
        """Return the last complete round, -1 before profiling is over."""
        return max((record["round"] for record in self.history()), default=-1)

    def wait(self, what: str, ready: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}:\n{self.tail()}")
            time.sleep(0.1)

    def wait_round(self, number: int) -> None:
        self.wait(f"round {number}", lambda: self.round() >= number or self.is_over())

    def is_over(self) -> bool:
        """Return whether ``flwr run --stream`` has ended, and with it the run."""
        return self.process is not None and self.process.poll() is not None

    def finish(self, timeout_s: float = 900.0) -> History:
        self.wait("the end of the run", self.is_over, timeout_s)
        return self.history()

    def client_app(self, node: str) -> list[int]:
        """Return the processes of a node's ClientApp, if it is running."""
        supernode = self.fleet.file.node(node).pid
        return [pid for pid in descendants(supernode) if name_of(pid) == "flwr-clientapp"]

    def server_app(self) -> list[int]:
        found = processes.find(self.fleet.folder)
        return [pid for pid in found if "flwr-serverapp" in command_of(pid)]

    def tail(self, characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """Return a process's name, because all processes of a warm node have one command line."""
    try:
        # A process that has ended has a name, but no command line.
        return Path(f"/proc/{pid}/comm").read_text().strip() if command_of(pid) else ""
    except OSError:
        return ""


def read_history(folder: Path) -> History:
    """Return the complete lines of a run's history: the last one may be half written."""
    path = folder / "history.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def durations(history: History) -> dict[int, float]:
    """Return the wall seconds of each round without profiling, which is round 0."""
    return {now["round"]: now["wall_s"] - last["wall_s"] for last, now in pairwise(history)}


def losses(history: History, rounds: int) -> dict[str, Any]:
    """Return whether a run came to its end, its rounds without a result, and its usual round."""
    bad = [record["round"] for record in history if record["failures"]]
    good_s = [s for number, s in durations(history).items() if number not in bad]
    return {
        "survived": [record["round"] for record in history] == list(range(rounds + 1)),
        "rounds_lost": sum(not record["train"] for record in history[1:]),
        "usual_round_s": round(statistics.median(good_s or [0.0]), 1),
    }
