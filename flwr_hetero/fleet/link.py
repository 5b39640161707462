"""A slow link in front of a SuperLink: a relay that lets only so many bits through."""

import asyncio
import time
from math import inf

from flwr_hetero.core.errors import invalid

CHUNK_BYTES = 16 * 1024


class Line:
    """One direction of a link: says how long each piece of data occupies it.

    Parameters
    ----------
    mbps : float
        Mbit/s; infinite for a free line.

    Raises
    ------
    ValueError
        If the speed is not positive.

    Examples
    --------
    >>> line = Line(mbps=8.0)
    >>> line.delay_s(500_000, now_s=0.0), line.delay_s(500_000, now_s=0.0)
    (0.5, 1.0)
    """

    def __init__(self, mbps: float) -> None:
        if not mbps > 0:
            raise invalid("mbps", mbps, "be positive", "leave it out for a free link")
        self.mbps = mbps
        self.free_at_s = -inf

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Put data on the line, behind what is on it already.

        Parameters
        ----------
        num_bytes : int
            Its size.
        now_s : float
            The time.

        Returns
        -------
        float
            Seconds until the data is through.
        """
        self.free_at_s = max(self.free_at_s, now_s) + 8e-6 * num_bytes / self.mbps
        return self.free_at_s - now_s


class Link:
    """Relay connections to a SuperLink at a device's link speed; TLS passes through untouched.

    Parameters
    ----------
    target : tuple of str and int
        Host and port of the SuperLink.
    uplink_mbps, downlink_mbps : float
        Speed from and to the device, shared by all its connections.
    """

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
