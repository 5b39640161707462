import asyncio

import pytest

from flwr_hetero.fleet.processes import free_ports
from flwr_hetero.fleet.throttle import Line, Link


def talk(mbps: float, payload: bytes, *, close: bool = False) -> bytes:
    """Send a payload through a link to a server that echoes it, and return what comes back."""

    async def echo(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def both() -> bytes:
        target, near = free_ports(2)
        server = await asyncio.start_server(echo, "127.0.0.1", target)
        link = Link(("127.0.0.1", target), mbps, mbps)
        await link.listen(near)
        reader, writer = await asyncio.open_connection("127.0.0.1", near)
        writer.write(payload)
        if close:
            await link.close()
        else:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(-1), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            await link.close()
            server.close()

    return asyncio.run(both())


def test_what_goes_in_comes_out_both_ways():
    payload = bytes(range(256)) * 2000
    assert talk(float("inf"), payload) == payload
    assert talk(1e4, payload) == payload


def test_closing_cuts_open_connections():
    assert talk(0.001, b"x" * 100, close=True) == b""


def test_nobody_behind_the_link_is_a_cut_connection():
    async def call() -> bytes:
        target, near = free_ports(2)
        link = Link(("127.0.0.1", target), 1.0, 1.0)
        await link.listen(near)
        reader, writer = await asyncio.open_connection("127.0.0.1", near)
        try:
            return await asyncio.wait_for(reader.read(-1), 10)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            await link.close()

    assert asyncio.run(call()) == b""


def test_all_connections_of_a_device_share_its_line():
    line = Line(mbps=1.0)
    first = line.delay_s(125_000, now_s=10.0)
    second = line.delay_s(125_000, now_s=10.5)
    assert (first, second) == (1.0, 1.5)
    assert line.delay_s(125_000, now_s=100.0) == 1.0  # an idle line owes nothing


@pytest.mark.parametrize("mbps", [0.0, -1.0, float("nan")])
def test_speed_out_of_range(mbps):
    with pytest.raises(ValueError, match="mbps must be positive"):
        Line(mbps)
