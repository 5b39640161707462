"""CPU limits by SIGSTOP and SIGCONT, link limits by a relay: ``python -m ... FOLDER``."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

from flwr_hetero.fleet.linux import check_linux
from flwr_hetero.fleet.processes import HOST, FleetFile, has_tag

# seconds for which a device that was idle may run at full speed
BURST_S = 0.1
CHUNK_BYTES = 16 * 1024
# seconds between two polls of the devices' processes
POLL_S = 0.02


class Throttle:
    """Keep the ClientApp processes below a device's SuperNode at their CPU share."""

    def __init__(self, share: float) -> None:
        self.share, self.credit_s, self._polled_s = share, share * BURST_S, time.monotonic()
        self._used_s, self._stopped = dict[int, float](), False

    def may_run(self, elapsed_s: float, used_s: float) -> bool:
        """Account for the time since the last call; return whether the device may run on."""
        # A bucket of CPU time that fills at ``share`` seconds per second. A process runs on until
        # it is stopped, and pays its debt in full: the share is exact while polls are at most
        # BURST_S apart. A later one finds the bucket full, and the device gets less.
        self.credit_s += self.share * elapsed_s - used_s
        self.credit_s = min(self.credit_s, self.share * BURST_S)
        return self.credit_s > 0

    def poll(self, supernode: int) -> None:
        """Measure the device's processes once, and stop or continue them."""
        now_s = time.monotonic()
        pids = [pid for executor in children(supernode) for pid in descendants(executor)]
        times = {pid: cpu_time_s(pid) for pid in pids}
        used_s = sum(time_s - self._used_s.get(pid, 0.0) for pid, time_s in times.items())
        runs = self.may_run(now_s - self._polled_s, used_s)
        self._used_s, self._polled_s = times, now_s
        if not runs or self._stopped:
            send(pids, signal.SIGCONT if runs else signal.SIGSTOP)
        self._stopped = not runs


def cpu_time_s(pid: int) -> float:
    """Return the CPU time that a process has used, finished threads included."""
    # Linux numbers the clock of a process as ~pid << 3 | 2; /proc counts in steps of 10 ms
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
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
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


class LinkBucket:
    """A token bucket without burst for one direction of a link: data waits for its turn."""

    def __init__(self, mbps: float) -> None:
        self.mbps, self.free_at_s = mbps, -inf

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Queue data behind what is on the link; return when it has passed."""
        self.free_at_s = max(self.free_at_s, now_s) + 8e-6 * num_bytes / self.mbps
        return self.free_at_s - now_s


async def relay(port: int, superlink: int, up_mbps: float, down_mbps: float) -> asyncio.Server:
    """Relay a device's connections at the speed of its link; TLS passes through unchanged."""
    up, down = LinkBucket(up_mbps), LinkBucket(down_mbps)

    async def serve(near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        outs = [near_out]
        try:
            far, far_out = await asyncio.open_connection(HOST, superlink)
            outs.append(far_out)
            await asyncio.gather(_pump(near, far_out, up), _pump(far, near_out, down))
        # the device sees a cut connection, as on any network
        except OSError:
            pass
        finally:
            for out in outs:
                out.close()

    return await asyncio.start_server(serve, HOST, port)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, link: LinkBucket) -> None:
    while data := await source.read(CHUNK_BYTES):
        await asyncio.sleep(link.delay_s(len(data), time.monotonic()))
        sink.write(data)
        await sink.drain()
    sink.write_eof()


async def enforce(folder: Path) -> None:
    """Enforce the limits of a fleet until cancelled; then let everything run freely."""
    check_linux("a throttle")
    fleet = FleetFile.load(folder)
    throttles = {node.name: Throttle(node.cpu) for node in fleet.nodes if node.cpu < 1}
    for node in fleet.nodes:
        if node.relay_port:
            await relay(node.relay_port, fleet.port, node.uplink_mbps, node.downlink_mbps)
    try:
        while True:
            for name, throttle in throttles.items():
                if has_tag(pid := fleet.node(name).pid, folder):
                    throttle.poll(pid)
            await asyncio.sleep(POLL_S)
            # a SuperNode that was started again has another process id
            fleet = FleetFile.load(folder)
    finally:
        for name in throttles:
            if has_tag(pid := fleet.node(name).pid, folder):
                send(descendants(pid), signal.SIGCONT)


if __name__ == "__main__":
    # as Ctrl-C does, this lets asyncio.run cancel what is under way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    asyncio.run(enforce(Path(sys.argv[1])))
