"""Flower's SuperNode with its options: kept warm, timed, and with its faults explained.

:mod:`flwr_hetero.fleet.warm` has the processes that keep it warm.
"""

import atexit
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.node_faults import NodeFaults, explain, why_not_writable
from flwr_hetero.fleet.processes import why_not_here
from flwr_hetero.fleet.warm import NOT_WARM, PIPES

COLD = "--cold"  # option for a node that starts a process for each message, as Flower's does
IDLE_SHARE = 0.05  # pause before the next request, as a share of the time without a message
MIN_IDLE_S = 0.05  # shortest such pause
FLOWERS_IDLE_S = 3.0  # pause of Flower's own SuperNode
RESTART_S = 10.0  # shortest time between two starts of a launcher
MAX_STARTS = 2  # launchers that may end before the node's first reply

_log = logging.getLogger("flwr")


class Launcher:
    """The process in place of SuperExec; pipes wake it for a run, and the SuperNode for a reply."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs, self._on_message = os.pipe()
        self._on_reply, self._replies = os.pipe()
        # The pipe is full if no launcher reads it.
        os.set_blocking(self._on_message, False)
        self._active_s = time.monotonic()
        self._command: Sequence[str] = ()
        self._started_s = 0.0
        self.has_replied = False
        self.is_cold = False
        # An ended launcher stays a zombie: Flower ends the messages of one whose id is gone.
        self.processes: list[subprocess.Popen[bytes]] = []
        _flwr.replace_in_node(self.sleep, self.start)

    def start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start the launcher with the arguments of Flower's command for SuperExec."""
        self._command = command
        self._started_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "flwr_hetero.fleet.warm", *command[1:]],
            pass_fds=(self._runs, self._replies),
            env={**os.environ, PIPES: f"{self._runs} {self._replies} {self.folder}"},
            # Ctrl-C in a terminal then reaches the SuperNode only, whose end ends the launcher.
            process_group=0,
        )
        self.processes.append(process)
        return process

    def wake(self, run_id: int) -> None:
        """Tell the launcher that a message of a run is about to come, or is there."""
        self._active_s = time.monotonic()
        with suppress(BlockingIOError):
            os.write(self._on_message, f"{run_id}\n".encode())

    def sleep(self, seconds: float) -> None:
        """Pause before the next request to the SuperLink, or until a reply is there."""
        now_s = time.monotonic()
        may_restart = self.processes and not self.is_cold and now_s > self._started_s + RESTART_S
        if may_restart and has_ended(self.processes[-1].pid):
            self._restart()
        if seconds >= FLOWERS_IDLE_S:
            pause_s = max(IDLE_SHARE * (now_s - self._active_s), MIN_IDLE_S)
            time.sleep(min(pause_s, seconds))
            return
        self._active_s = now_s
        if select([self._on_reply], [], [], seconds)[0]:
            os.read(self._on_reply, 4096)
            self.has_replied = True

    def _restart(self) -> None:
        """Start another launcher, or Flower's SuperExec if no launcher can work."""
        self.is_cold = not self.has_replied and len(self.processes) >= MAX_STARTS
        if self.is_cold:
            _log.warning("this node is cold from now on: launchers end before its first reply")
            self.processes.append(subprocess.Popen(self._command))
        else:
            _log.warning("the launcher has ended and is started again")
            self.start(self._command)


def has_ended(pid: int) -> bool:
    """Return whether a child process has ended, and leave it a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Watcher:
    """What is done about each message of a SuperNode, by its launcher if it is warm.

    The processes of messages find the times of the SuperNode in a file: when a message was
    received, and how long that and the last send of a reply of its type took.
    """

    def __init__(self, folder: Path, launcher: Launcher | None) -> None:
        self.folder = folder
        self.launcher = launcher
        self.faults = NodeFaults()
        self.answered = self.faults.answered
        self.times = folder / "times.json"
        self._sent_s: dict[str, float] = {}

    def fetched(self, run_id: int, app: _flwr.App) -> None:
        """Mend an app that is installed in part, and have it loaded before its first message."""
        self.faults.fetched(run_id, app)
        if self.launcher is not None:
            try:
                app.save(self.folder / f"{run_id}")
            except OSError as error:
                _log.warning(NOT_WARM, app.fab_id, explain(str(error)) or error)
            self.launcher.wake(run_id)

    def received(self, message: Message, seconds: float) -> None:
        """Write the times of a message that has been received, in one step."""
        times = {keys.RECEIVE_TIME: seconds, keys.RECEIVED_AT: time.monotonic()}
        if message.metadata.message_type in self._sent_s:
            times[keys.SEND_TIME] = self._sent_s[message.metadata.message_type]
        draft = self.times.with_suffix(".draft")
        # On a full disk only the times are lost, not the message.
        with suppress(OSError):
            draft.write_text(json.dumps(times), encoding="utf-8")
            draft.replace(self.times)
        if self.launcher is not None:
            self.launcher.wake(message.metadata.run_id)

    def replied(self, reply: Message, seconds: float) -> None:
        """Remember the time of a reply, and remove the file, which is not for the next message."""
        self._sent_s[reply.metadata.message_type] = seconds
        with suppress(OSError):
            self.times.unlink(missing_ok=True)
        self.faults.replied(reply)


def why_cold(options: Sequence[str]) -> str:
    """Return why a node with these options cannot be warm; "" if it can."""
    if COLD in options:
        return f"{COLD} was given"
    if "--allow-runtime-dependency-installation" in options:
        return "each message installs the packages of its app"
    if "process" in options or "--isolation=process" in options:
        return "with --isolation process, others start the processes"
    return why_not_here() or _flwr.lacking(_flwr.WARM)


def watch(options: Sequence[str]) -> NodeFaults:
    """Watch the SuperNode of this process, and make it warm unless its options forbid that."""
    reason = why_cold(options)
    if reason:
        _log.warning("this node is cold, as Flower's own nodes are: %s", reason)
    unwatched = _flwr.lacking(_flwr.WATCHED)
    if unwatched:
        _log.warning("this node does not explain its faults: %s", unwatched)
        return NodeFaults()
    folder = Path(os.devnull)
    # Without a folder, times are not written, and no app can be loaded before its first message.
    with suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="flwr-hetero-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not reason:
        pull_quickly()
    watcher = Watcher(folder, None if reason else Launcher(folder))
    os.environ[keys.TIMES_FILE] = str(watcher.times)
    _flwr.watch_node(watcher)
    threading.excepthook = watcher.faults.thread_failed
    return watcher.faults


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run ``flower-supernode``, and end this process when that returns, as SIGTERM does.

    The exit status is 1, and not 0 as Flower's, if the SuperNode ends because of a fault.
    """
    options = list(sys.argv[1:] if arguments is None else arguments)
    sys.argv[1:] = [option for option in options if option != COLD]
    faults = watch(options)
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
