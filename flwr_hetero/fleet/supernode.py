"""Flower's SuperNode, kept warm (:mod:`flwr_hetero.fleet.warm`), with the options of Flower's."""

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from select import select
from typing import Any

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.linux import why_not_here
from flwr_hetero.fleet.message_times import record_times
from flwr_hetero.fleet.node_faults import NodeFaults, why_not_writable
from flwr_hetero.fleet.warm import PIPES

COLD = "--cold"  # option for a node that starts a process for each message, as Flower's does
IDLE_SHARE = 0.05  # pause before the next request, as a share of the time without a message
MIN_IDLE_S = 0.05  # shortest such pause
FLOWERS_IDLE_S = 3.0  # pause of Flower's own SuperNode
RESTART_S = 10.0  # shortest time between two starts of a launcher
MAX_STARTS = 2  # launchers that may end before the node's first reply

_log = logging.getLogger("flwr")


class WarmNode:
    """A launcher in place of SuperExec, and pipes that wake it, and the SuperNode for a reply."""

    def __init__(self) -> None:
        self.task, self.on_task = os.pipe()
        self.on_reply, self.reply = os.pipe()
        self.active_s = time.monotonic()
        self.command: Sequence[str] = ()
        self.started_s = 0.0
        self.has_replied = False
        self.is_cold = False
        # Ended launchers are kept as zombies: Flower ends the messages of one whose id is gone.
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start the launcher with the arguments of Flower's command for SuperExec."""
        self.command = command
        self.started_s = time.monotonic()
        launcher = subprocess.Popen(
            [sys.executable, "-m", "flwr_hetero.fleet.warm", *command[1:]],
            pass_fds=(self.task, self.reply),
            env={**os.environ, PIPES: f"{self.task} {self.reply}"},
            # Ctrl-C in a terminal then reaches the SuperNode only, whose end ends the launcher.
            process_group=0,
        )
        self.launchers.append(launcher)
        return launcher

    def on_message(self) -> None:
        """Wake the launcher, for a message that has arrived."""
        self.active_s = time.monotonic()
        os.write(self.on_task, b".")

    def sleep(self, seconds: float) -> None:
        """Pause before the next request to the SuperLink, or until a reply is there."""
        now_s = time.monotonic()
        may_restart = self.launchers and not self.is_cold and now_s > self.started_s + RESTART_S
        if may_restart and has_ended(self.launchers[-1].pid):
            self._restart()
        if seconds >= FLOWERS_IDLE_S:
            pause_s = max(IDLE_SHARE * (now_s - self.active_s), MIN_IDLE_S)
            time.sleep(min(pause_s, seconds))
            return
        self.active_s = now_s
        if select([self.on_reply], [], [], seconds)[0]:
            os.read(self.on_reply, 4096)
            self.has_replied = True

    def _restart(self) -> None:
        """Start another launcher, or Flower's SuperExec if no launcher can work."""
        self.is_cold = not self.has_replied and len(self.launchers) >= MAX_STARTS
        if self.is_cold:
            _log.warning("this node is cold from now on: launchers end before its first reply")
            self.launchers.append(subprocess.Popen(self.command))
        else:
            _log.warning("the launcher has ended and is started again")
            self.start(self.command)


def keep_warm() -> Callable[[], None]:
    """Make the SuperNode of this process warm; return the function to call for each message."""
    node = WarmNode()
    pull_quickly()
    _flwr.replace_in_node(node.sleep, node.start)
    return node.on_message


def has_ended(pid: int) -> bool:
    """Return whether a child process has ended, and leave it a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def why_cold(options: Sequence[str]) -> str:
    """Return why a node with these options cannot be warm; "" if it can."""
    if COLD in options:
        return f"{COLD} was given"
    if "--allow-runtime-dependency-installation" in options:
        return "each message installs the packages of its app"
    if "process" in options or "--isolation=process" in options:
        return "with --isolation process, others start the processes"
    return why_not_here() or _flwr.why_not_warm()


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run ``flower-supernode``, and end this process when that returns, as SIGTERM does.

    The exit status is 1, and not 0 as Flower's, if the SuperNode ends because of a fault.
    """
    options = list(sys.argv[1:] if arguments is None else arguments)
    sys.argv[1:] = [option for option in options if option != COLD]
    on_message = None
    reason = why_cold(options)
    if reason:
        _log.warning("this node is cold, as Flower's own nodes are: %s", reason)
    else:
        on_message = keep_warm()
    faults = NodeFaults()
    # Both are looked for in Flower as it is installed, before anything in it is replaced.
    unwatched = _flwr.why_not_watched()
    if not _flwr.why_not_warm():
        record_times(on_message)
    if unwatched:
        _log.warning("this node does not explain its faults: %s", unwatched)
    else:
        faults.watch()
    reason = why_not_writable(_flwr.flwr_home())
    if reason:
        _log.error("%s", reason)
        sys.exit(1)
    has_ended_itself = False
    try:
        try:
            _flwr.run_command("flower-supernode")
        except Exception:
            traceback.print_exc()
        has_ended_itself = True
        # When the SuperNode's loop ends, as after an expired certificate, a thread that serves its
        # ClientApps would keep this process alive, so that nothing would start the node again.
        signal.raise_signal(signal.SIGTERM)
    except SystemExit as end:
        sys.exit(end.code or int(has_ended_itself or faults.is_refused))


if __name__ == "__main__":
    main()
