"""Flower's command line, called for a fleet on this machine: runs, registration, who is online."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from flwr_hetero.fleet import commands
from flwr_hetero.fleet.fleet_file import Node

ANSWER_S = 60.0
"""Seconds that the SuperLink may take to say who is online."""
NODES = "nodes.json"
"""In the fleet's ``FLWR_HOME``: the names of registered node ids."""


class FlowerCli:
    """Call ``flwr`` against the SuperLink of a fleet.

    Parameters
    ----------
    folder : Path
        The fleet's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def flwr(self, *arguments: str, timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
        """Run Flower's command line against this fleet.

        Parameters
        ----------
        *arguments : str
            For instance ``"run", "apps/tifl", "fleet", "--stream"``.
        timeout_s : float
            Seconds it may take.

        Returns
        -------
        CompletedProcess
            With what it printed.
        """
        return subprocess.run(
            [str(commands.BIN / "flwr"), *arguments],
            env=commands.environment(self.folder / "home"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run_line(self, app: str = "apps/tifl") -> str:
        """Return the shell line that runs an app on this fleet.

        Parameters
        ----------
        app : str
            Path of the app.

        Returns
        -------
        str
            To be typed in any shell in which ``flwr`` is found.
        """
        settings = {"FLWR_HOME": str(self.folder / "home")}
        if commands.is_behind_proxy():
            settings["no_proxy"] = commands.no_proxy()["no_proxy"]
        words = " ".join(f"{name}={quote(value)}" for name, value in settings.items())
        return f"{words} flwr run {quote(app)} {commands.CONNECTION} --stream"

    def online(self) -> set[str]:
        """Ask the SuperLink which SuperNodes are online.

        Returns
        -------
        set of str
            Their names; empty if the SuperLink does not answer, or knows none of them yet.
        """
        ask = ("supernode", "list", commands.CONNECTION, "--format", "json")
        try:
            ids = json.loads((self.folder / "home" / NODES).read_text(encoding="utf-8"))
            listed = json.loads(self.flwr(*ask, timeout_s=ANSWER_S).stdout)["nodes"]
        except (FileNotFoundError, subprocess.TimeoutExpired, ValueError, KeyError):
            return set()
        here = [node["node-id"] for node in listed if node["status"] == "online"]
        return {ids[node_id] for node_id in here if node_id in ids}

    def register(self, nodes: Sequence[Node], timeout_s: float = 120.0) -> None:
        """Tell the SuperLink the public keys of SuperNodes, and keep the ids that it gives them.

        Parameters
        ----------
        nodes : sequence of Node
            Their keys are in the fleet's folder.
        timeout_s : float
            Seconds that each may take.

        Raises
        ------
        RuntimeError
            If one is not taken; says why.
        """
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
