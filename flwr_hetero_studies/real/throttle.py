"""Real fleets of unequal devices: CPU shares by SIGSTOP and SIGCONT, and link speeds by a relay."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from math import inf, isinf
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.processes import HOST, free_ports

T = TypeVar("T")
BURST_S = 0.1
"""Time for which a device that was idle may run at full speed."""
CHUNK_BYTES = 16 * 1024
POLL_S = 0.02
"""Time between two polls of the devices' processes."""


class ThrottledFleet(RealFleet):
    """A fleet whose nodes have the link speeds of device profiles, and shares of one CPU.

    The fastest node has the share ``cpu``, and the shares of the others are in proportion.
    """

    def __init__(
        self,
        folder: Path,
        profiles: Sequence[DeviceProfile],
        settings: Mapping[str, str] | None = None,
        cpu: float = 1.0,
    ) -> None:
        super().__init__(folder, settings)
        fastest = max(profile.compute_factor for profile in profiles)
        self.profiles = {f"node-{i}": profile for i, profile in enumerate(profiles)}
        shares = {name: cpu * p.compute_factor / fastest for name, p in self.profiles.items()}
        self.throttles = {name: Throttle(share) for name, share in shares.items() if share < 1}
        self._relays: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def start(self, **options: Any) -> None:
        """Start all nodes, with the options of :meth:`up`."""
        self._thread.start()
        self.up(len(self.profiles), **options)
        asyncio.run_coroutine_threadsafe(self._limit_shares(), self._loop)

    def start_node(self, name: str) -> None:
        """Start or restart a SuperNode, behind a relay if its link is limited."""
        file = self.file
        node = file.node(name)
        links = (self.profiles[name].uplink_mbps, self.profiles[name].downlink_mbps)
        if node.superlink_port == file.port and not isinf(min(links)):
            (node.superlink_port,) = free_ports(1)
            opened = relay(node.superlink_port, file.port, *map(LinkBucket, links))
            self._relays.append(self._await(opened))
            file.save(self.folder)
        super().start_node(name)

    def down(self, *, keep: bool = False) -> int:
        """Lift the limits, and end all processes of the fleet."""
        if self._thread.is_alive():
            self._await(self._end_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return super().down(keep=keep)

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _end_tasks(self) -> None:
        for server in self._relays:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _limit_shares(self) -> None:
        while True:
            # A restarted SuperNode has another process id.
            for node in self.file.nodes:
                if node.name in self.throttles and self.is_alive(node.pid):
                    self.throttles[node.name].poll(node.pid)
            await asyncio.sleep(POLL_S)


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


async def relay(port: int, superlink: int, up: LinkBucket, down: LinkBucket) -> asyncio.Server:
    """Relay a device's connections at the speed of its link, with TLS unchanged."""

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
