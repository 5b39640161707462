"""A share of one CPU for a device's processes: measured, and held by stopping and continuing.

This is what works for any user on any Linux: cgroups need rights that are not there in a
container or on a shared machine, ``nice`` only matters when CPUs are short, affinity cannot give
less than one core.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from flwr_hetero.core.errors import invalid

BURST_S = 0.1
"""A device that was idle may run this long at full speed before its share is enforced."""


class CpuShare:
    """Keep processes at a share of one CPU, as a bucket of CPU time that refills steadily.

    Parameters
    ----------
    share : float
        CPU seconds per second, in (0, 1].

    Raises
    ------
    ValueError
        If the share is out of range.

    Notes
    -----
    The bucket may go into debt (a process runs on until it is stopped), and a debt is waited
    for in full: over some tenths of a second the share is exact, whatever the resolution of the
    timer. Nobody touches a device with a share of 1.

    Examples
    --------
    >>> bucket = CpuShare(0.25)
    >>> bucket.may_run(elapsed_s=1.0, used_s=0.1), bucket.may_run(elapsed_s=0.1, used_s=0.1)
    (True, False)
    >>> bucket.may_run(elapsed_s=0.1, used_s=0.0), bucket.may_run(elapsed_s=0.2, used_s=0.0)
    (False, True)
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise invalid("share", share, "lie in (0, 1]", "1 is a whole CPU")
        self.share = share
        self.credit_s = self.share * BURST_S

    def may_run(self, elapsed_s: float, used_s: float) -> bool:
        """Take in what happened since the last call, and tell whether the device may run on.

        Parameters
        ----------
        elapsed_s : float
            Time since the last call.
        used_s : float
            CPU time used since then, all processes of the device together.

        Returns
        -------
        bool
            False while it has used more than its share.
        """
        self.credit_s += self.share * elapsed_s - used_s
        self.credit_s = min(self.credit_s, self.share * BURST_S)
        return self.credit_s > 0


class Throttle:
    """Hold the ClientApp processes below a device's SuperNode at their CPU share.

    Parameters
    ----------
    share : float
        CPU seconds per second, in (0, 1].
    """

    def __init__(self, share: float) -> None:
        self.bucket = CpuShare(share)
        self._used_s: dict[int, float] = {}
        self._stopped = False
        self._seen_s = time.monotonic()

    def look(self, supernode: int) -> None:
        """Look at the device's processes once, and stop or continue them.

        Parameters
        ----------
        supernode : int
            Process id of the SuperNode; its children are Flower's executors, whose children
            are ClientApps. Only those are ever touched: the node stays online.
        """
        now_s = time.monotonic()
        pids = [pid for executor in children(supernode) for pid in descendants(executor)]
        times = {pid: cpu_time_s(pid) for pid in pids}
        used_s = sum(now - self._used_s.get(pid, 0.0) for pid, now in times.items())
        runs = self.bucket.may_run(now_s - self._seen_s, used_s)
        self._used_s, self._seen_s = times, now_s
        if not runs or self._stopped:
            send(pids, signal.SIGCONT if runs else signal.SIGSTOP)
        self._stopped = not runs

    def release(self, supernode: int) -> None:
        """Let the device's processes run freely again.

        Parameters
        ----------
        supernode : int
            As for :meth:`look`.
        """
        send(descendants(supernode), signal.SIGCONT)


def cpu_time_s(pid: int) -> float:
    """Return the CPU time that a process has used, finished threads included, in seconds.

    Parameters
    ----------
    pid : int
        A process; 0.0 if it is gone.

    Returns
    -------
    float
        Seconds, to the nanosecond.

    Notes
    -----
    Linux numbers the clock of a process as ``~pid << 3 | 2``; ``/proc`` counts in steps of 10 ms,
    too coarse for short slices.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def children(pid: int) -> list[int]:
    """Return the child processes of a process; none if it is gone.

    Parameters
    ----------
    pid : int
        A process.

    Returns
    -------
    list of int
        Process ids, also of children that another thread started.
    """
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below a process.

    Parameters
    ----------
    pid : int
        A process.

    Returns
    -------
    list of int
        Children, their children, and so on.
    """
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def send(pids: list[int], signal_number: int) -> None:
    """Send a signal to processes; those that are gone are passed over.

    Parameters
    ----------
    pids : list of int
        Processes.
    signal_number : int
        The signal.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
