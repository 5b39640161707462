"""Flower's SuperNode, kept warm, and ended when it gives its SuperLink up.

``flwr-hetero supernode OPTIONS``, those of ``flower-supernode``; see :mod:`flwr_hetero.fleet.warm`.
"""

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from select import select
from typing import Any

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.linux import why_not_here
from flwr_hetero.fleet.message_times import tell_times
from flwr_hetero.fleet.warm import PIPES

IDLE_SHARE, LEAST_S = 0.05, 0.05
"""Pause before the SuperLink is asked again, of the time without a message; at least, seconds."""
COLD = "--cold"
"""Our own option: Flower's way, a new process for each message."""
FLOWERS_IDLE_S = 3.0
"""Flower's own pause, and the most of ours."""
AGAIN_S = 10.0
"""Seconds after which a launcher that has ended is started again."""


def keep_warm() -> None:
    """Start our launcher in SuperExec's place, and sleep no longer than needed."""
    (task, on_task), (on_reply, reply) = os.pipe(), os.pipe()
    active_s = time.monotonic()
    launchers: list[tuple[float, Sequence[str], subprocess.Popen[bytes]]] = []

    def sleep(seconds: float) -> None:
        nonlocal active_s
        now_s = time.monotonic()
        # without one, messages wait for ever
        for begun_s, command, launcher in launchers[-1:]:
            if now_s > begun_s + AGAIN_S and has_ended(launcher.pid):
                logging.getLogger("flwr").warning("the launcher has ended: it is started again")
                start(command)
        if seconds >= FLOWERS_IDLE_S:
            time.sleep(min(max(IDLE_SHARE * (now_s - active_s), LEAST_S), seconds))
            return
        # for a reply: its process says when it is there
        active_s = now_s
        if select([on_reply], [], [], seconds)[0]:
            os.read(on_reply, 4096)

    def on_message() -> None:
        nonlocal active_s
        active_s = time.monotonic()
        os.write(on_task, b".")

    def start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
        launcher = subprocess.Popen(
            [sys.executable, "-m", "flwr_hetero.fleet.warm", *command[1:]],
            pass_fds=(task, reply),
            env={**os.environ, PIPES: f"{task} {reply}"},
        )
        launchers.append((time.monotonic(), command, launcher))
        return launcher

    pull_quickly()
    _flwr.replace_in_node(sleep, on_message, start)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended; it stays a zombie, as a message would end with its id."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def why_cold(arguments: Sequence[str]) -> str:
    """Return why a node with these options is Flower's own; "" if it can be kept warm."""
    if COLD in arguments:
        return f"{COLD} was given"
    if "--allow-runtime-dependency-installation" in arguments:
        return "each message installs the packages of its app"
    if "process" in arguments or "--isolation=process" in arguments:
        return "with --isolation process others start the processes"
    # macOS has forks, too, and libraries that do not bear them
    return why_not_here() or _flwr.why_untried()


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run ``flower-supernode``, and end it as SIGTERM does when it returns."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.argv[1:] = [each for each in given if each != COLD]
    # first: a launcher that hears of a message finds its times
    if not _flwr.why_untried():
        tell_times()
    if why := why_cold(given):
        logging.getLogger("flwr").warning("a cold node, as Flower's: %s", why)
    else:
        keep_warm()
    try:
        _flwr.run_command("flower-supernode")
    except Exception:
        traceback.print_exc()
    # A thread that serves its ClientApps keeps the process when the loop that talks to the
    # SuperLink is over, as by an expired certificate: nothing would start it again.
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
