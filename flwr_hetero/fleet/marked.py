"""Processes of a fleet: started with a mark in their environment, found and ended by it.

A child inherits its parent's environment, so the mark is on whatever Flower starts in turn. A
process is ended through a handle taken before its mark is read: never another one that got the
same process id meanwhile.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "FLWR_HETERO_FLEET"
"""Environment variable: the folder of the fleet that a process belongs to."""
GRACE_S = 6.0
"""Seconds between the polite signal and the other one; Flower gives a ServerApp 5."""
EXEC_S = 0.2
"""Seconds for which a process without an environment may be one that still loads its program."""
PROC = Path("/proc")
_started: list[int] = []


def start(command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> int:
    """Start a process that stays when we end.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    folder : Path
        The fleet's folder, for the mark; also the working directory.
    log : Path
        Gets what the process prints, appended.
    environment : mapping of str to str
        Its environment, the mark left out.

    Returns
    -------
    int
        Process id.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.returncode = 0  # so that Python does not warn of a child that is left running
    _started.append(process.pid)
    return process.pid


def find(folder: Path) -> list[int]:
    """Find the processes that carry a fleet's mark.

    Parameters
    ----------
    folder : Path
        The fleet's folder.

    Returns
    -------
    list of int
        Process ids, this one left out.
    """
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and has_mark(pid, folder)]


def has_mark(pid: int, folder: Path) -> bool:
    """Tell whether a process is alive and belongs to a fleet.

    Parameters
    ----------
    pid : int
        A process.
    folder : Path
        The fleet's folder.

    Returns
    -------
    bool
        False also for processes of other users and for those that only wait to be collected.
    """
    try:
        environment = _environment(pid)
    except OSError:
        return False
    return f"{MARK}={folder}".encode() in environment.split(b"\0")


def _environment(pid: int) -> bytes:
    """Read a process's environment, if need be as soon as it has one.

    While a new program is loaded, for some microseconds or, on a busy machine, milliseconds, a
    process has a program but no environment: it would pass for one that is gone. ``Popen``
    returns before that is over. Kernel threads and zombies have no program either.
    """
    process, deadline_s = PROC / str(pid), time.monotonic() + EXEC_S
    while not (environment := (process / "environ").read_bytes()):
        (process / "exe").readlink()
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.001)
    return environment


def end(folder: Path, grace_s: float = GRACE_S) -> int:
    """End all processes that carry a fleet's mark, and wait until they are gone.

    Parameters
    ----------
    folder : Path
        The fleet's folder.
    grace_s : float
        Seconds they have to end by themselves.

    Returns
    -------
    int
        How many there were.
    """
    asked: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while pids := find(folder):
        late = time.monotonic() > deadline_s
        for pid in pids if late else set(pids) - asked:
            end_one(pid, folder, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.1)
    collect()
    return len(asked)


def end_one(pid: int, folder: Path, signal_number: int) -> None:
    """Send a signal to one process of a fleet, awake if it was stopped.

    Parameters
    ----------
    pid : int
        A process; passed over if it is gone or not of this fleet.
    folder : Path
        The fleet's folder.
    signal_number : int
        The signal.
    """
    if pid < 1:  # never started; the kernel would call the number itself wrong
        return
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if has_mark(pid, folder):
                signal.pidfd_send_signal(handle, signal_number)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
        finally:
            os.close(handle)


def collect() -> None:
    """Collect processes that this one started and that have ended, so that none is a zombie."""
    for pid in list(_started):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
        _started.remove(pid)
