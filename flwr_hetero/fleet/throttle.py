"""A share of one CPU for a device's processes: measured, and held by stopping and continuing.

This is what works for any user on any Linux: cgroups need rights that are not there in a
container or on a shared machine, ``nice`` only matters when CPUs are short, affinity cannot give
less than one core.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

from flwr_hetero.errors import invalid
from flwr_hetero.fleet.fleet_file import FILE, HOST, FleetFile
from flwr_hetero.fleet.processes import has_mark

BURST_S = 0.1
"""A device that was idle may run this long at full speed before its share is enforced."""


class CpuShare:
    """Keep processes at a share of one CPU, as a bucket of CPU time that refills steadily.

    Notes
    -----
    The bucket may go into debt (a process runs on until it is stopped), and a debt is waited
    for in full: over some tenths of a second the share is exact, whatever the resolution of the
    timer. Nobody touches a device with a share of 1.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise invalid("share", share, "lie in (0, 1]", "1 is a whole CPU")
        self.share = share
        self.credit_s = self.share * BURST_S

    def may_run(self, elapsed_s: float, used_s: float) -> bool:
        """Take in what happened since the last call, and tell whether the device may run on."""
        self.credit_s += self.share * elapsed_s - used_s
        self.credit_s = min(self.credit_s, self.share * BURST_S)
        return self.credit_s > 0


class Throttle:
    """Hold the ClientApp processes below a device's SuperNode at their CPU share."""

    def __init__(self, share: float) -> None:
        self.bucket = CpuShare(share)
        self._used_s: dict[int, float] = {}
        self._stopped = False
        self._seen_s = time.monotonic()

    def look(self, supernode: int) -> None:
        """Look at the device's processes once, and stop or continue them."""
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
        """Let the device's processes run freely again."""
        send(descendants(supernode), signal.SIGCONT)


def cpu_time_s(pid: int) -> float:
    """Return the CPU time that a process has used, finished threads included, in seconds.

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
    """Return the child processes of a process; none if it is gone."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def send(pids: list[int], signal_number: int) -> None:
    """Send a signal to processes; those that are gone are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


CHUNK_BYTES = 16 * 1024


class Line:
    """One direction of a link: says how long each piece of data occupies it."""

    def __init__(self, mbps: float) -> None:
        if not mbps > 0:
            raise invalid("mbps", mbps, "be positive", "leave it out for a free link")
        self.mbps = mbps
        self.free_at_s = -inf

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Put data on the line, behind what is on it already."""
        self.free_at_s = max(self.free_at_s, now_s) + 8e-6 * num_bytes / self.mbps
        return self.free_at_s - now_s


class Link:
    """Relay connections to a SuperLink at a device's link speed; TLS passes through untouched."""

    def __init__(self, target: tuple[str, int], uplink_mbps: float, downlink_mbps: float) -> None:
        self.target = target
        self.up, self.down = Line(uplink_mbps), Line(downlink_mbps)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> None:
        """Begin to accept connections of the device on the loopback interface.

        Parameters
        ----------
        port : int
            Where the device connects to.
        """
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def close(self) -> None:
        """Cut all connections and accept no more."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        outs = [near_out]
        try:
            far, far_out = await asyncio.open_connection(*self.target)
            outs.append(far_out)
            await asyncio.gather(_pump(near, far_out, self.up), _pump(far, near_out, self.down))
        except (OSError, asyncio.CancelledError):
            pass  # the device sees a cut connection, as on any network
        finally:
            self._open.discard(task)
            for out in outs:
                out.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, line: Line) -> None:
    while data := await source.read(CHUNK_BYTES):
        await asyncio.sleep(line.delay_s(len(data), time.monotonic()))
        sink.write(data)
        await sink.drain()
    sink.write_eof()


LOOK_S = 0.02
"""Seconds between two looks at the devices' processes."""


async def keep_watch(folder: Path) -> None:
    """Enforce the limits of a fleet until cancelled; then let everything run freely.

    Parameters
    ----------
    folder : Path
        The fleet's folder. Its file is read again when it changes: a restarted SuperNode has
        another process id.
    """
    fleet = FleetFile.load(folder)
    throttles = {node.name: Throttle(node.cpu) for node in fleet.nodes if node.cpu < 1}
    links = [
        (node, Link((HOST, fleet.port), node.uplink_mbps, node.downlink_mbps))
        for node in fleet.nodes
        if node.has_link
    ]
    for node, link in links:
        await link.listen(node.link_port)
    changed_ns = 0
    try:
        while True:
            if (now_ns := (folder / FILE).stat().st_mtime_ns) != changed_ns:
                fleet, changed_ns = FleetFile.load(folder), now_ns
            for name, throttle in throttles.items():
                if has_mark(pid := fleet.node(name).pid, folder):
                    throttle.look(pid)
            await asyncio.sleep(LOOK_S)
    finally:
        for name, throttle in throttles.items():
            if has_mark(pid := fleet.node(name).pid, folder):
                throttle.release(pid)
        for _, link in links:
            await link.close()


async def _until_told(folder: Path) -> None:
    watch = asyncio.ensure_future(keep_watch(folder))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, watch.cancel)
    with suppress(asyncio.CancelledError):
        await watch


if __name__ == "__main__":
    asyncio.run(_until_told(Path(sys.argv[1])))
