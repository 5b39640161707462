"""CPU limits by SIGSTOP and SIGCONT, link limits by a relay: ``python -m ... FOLDER``."""

import asyncio
import os
import signal
import sys
import time
from contextlib import closing, suppress
from math import inf
from pathlib import Path

from flwr_hetero.fleet.processes import HOST, FleetFile, has_tag

BURST_S = 0.1  # time for which a device that was idle may run at full speed
CHUNK_BYTES = 16 * 1024
POLL_S = 0.02  # time between two polls of the devices' processes


class Throttle:
    """Keep the ClientApp processes below a device's SuperNode at their CPU share."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.credit_s = share * BURST_S
        self._polled_s = time.monotonic()
        self._used_s: dict[int, float] = {}
        self._is_stopped = False

    def may_run(self, elapsed_s: float, used_s: float) -> bool:
        """Account for the time since the last call; return whether the device may run on."""
        # This is a token bucket of CPU time that fills at `share` seconds per second. A process
        # runs until it is stopped and pays its debt in full, so the share is exact if polls are at
        # most BURST_S apart. After a later poll the bucket is full, and the device gets less.
        self.credit_s += self.share * elapsed_s - used_s
        self.credit_s = min(self.credit_s, self.share * BURST_S)
        return self.credit_s > 0

    def poll(self, supernode: int) -> None:
        """Measure the CPU time of the device's processes, and stop or continue them."""
        now_s = time.monotonic()
        pids = [pid for executor in children(supernode) for pid in descendants(executor)]
        times_s = {pid: cpu_time_s(pid) for pid in pids}
        used_s = sum(time_s - self._used_s.get(pid, 0.0) for pid, time_s in times_s.items())
        may_run = self.may_run(now_s - self._polled_s, used_s)
        self._used_s = times_s
        self._polled_s = now_s
        if self._is_stopped or not may_run:
            send(pids, signal.SIGCONT if may_run else signal.SIGSTOP)
        self._is_stopped = not may_run


def cpu_time_s(pid: int) -> float:
    """Return the CPU time that a process has used, finished threads included."""
    # Linux numbers the CPU clock of a process like this. The times in /proc have steps of 10 ms.
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def children(pid: int) -> list[int]:
    """Return the child processes of a process; none if it has ended."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (task / "children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def send(pids: list[int], signal_number: int) -> None:
    """Send a signal to those of the processes that have not ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


class LinkBucket:
    """One direction of a link: a queue of data without burst."""

    def __init__(self, mbps: float) -> None:
        self.mbps = mbps
        self.free_at_s = -inf

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Add data to the queue; return the seconds until it has passed."""
        self.free_at_s = max(self.free_at_s, now_s) + 8e-6 * num_bytes / self.mbps
        return self.free_at_s - now_s


async def relay(port: int, superlink: int, up_mbps: float, down_mbps: float) -> asyncio.Server:
    """Relay a device's connections at the speed of its link, with TLS unchanged."""
    up = LinkBucket(up_mbps)
    down = LinkBucket(down_mbps)

    async def serve(node_in: asyncio.StreamReader, node_out: asyncio.StreamWriter) -> None:
        # After an error, the device sees a broken connection, as on any network.
        with closing(node_out), suppress(OSError):
            link_in, link_out = await asyncio.open_connection(HOST, superlink)
            with closing(link_out):
                await asyncio.gather(_pump(node_in, link_out, up), _pump(link_in, node_out, down))

    return await asyncio.start_server(serve, HOST, port)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, link: LinkBucket) -> None:
    while data := await source.read(CHUNK_BYTES):
        await asyncio.sleep(link.delay_s(len(data), time.monotonic()))
        sink.write(data)
        await sink.drain()
    sink.write_eof()


async def enforce(folder: Path) -> None:
    """Enforce the limits of a fleet until this is cancelled, then lift them."""
    fleet = FleetFile.load(folder)
    throttles = {node.name: Throttle(node.cpu) for node in fleet.nodes if node.cpu < 1}
    for node in fleet.nodes:
        if node.relay_port:
            await relay(node.relay_port, fleet.port, node.uplink_mbps, node.downlink_mbps)
    try:
        while True:
            for name, throttle in throttles.items():
                pid = fleet.node(name).pid
                if has_tag(pid, folder):
                    throttle.poll(pid)
            await asyncio.sleep(POLL_S)
            # Read the file again, because a restarted SuperNode has another process id.
            fleet = FleetFile.load(folder)
    finally:
        for name in throttles:
            pid = fleet.node(name).pid
            if has_tag(pid, folder):
                send(descendants(pid), signal.SIGCONT)


if __name__ == "__main__":
    # This lets asyncio.run cancel its tasks, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    asyncio.run(enforce(Path(sys.argv[1])))
