import asyncio
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import throttle as t
from flwr_hetero.fleet.processes import free_ports
from flwr_hetero.fleet.throttle import BURST_S, Throttle

SPIN = "import sys; print('up', flush=True)\nwhile True: pass"
RUN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}]).wait()"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("polls", [[0.005] * 200, [BURST_S] * 50, [0.005, BURST_S, 0.03] * 30])
def test_bucket_holds_a_busy_device_at_its_share(share, polls):
    throttle = Throttle(share)
    runs = True
    used_s = 0.0
    passed_s = 0.0
    for elapsed_s in polls:  # the device runs whenever it may, from poll to poll
        used_s += elapsed_s * runs
        passed_s += elapsed_s
        runs = throttle.may_run(elapsed_s, elapsed_s * runs)
        assert used_s <= share * (passed_s + BURST_S) + max(polls) + 1e-9
        assert used_s >= share * passed_s - max(polls) - 1e-9
    throttle.may_run(3600.0, 0.0)
    assert throttle.credit_s == share * BURST_S  # no more than one burst is saved up


@pytest.fixture
def tree():
    """Stand in for a SuperNode with its executor and a ClientApp: three generations."""
    parent = RUN.format(code=RUN.format(code=SPIN))
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout.readline() == "up\n"
        below = t.descendants(top.pid)
        yield top.pid, below
        t.send([*below, top.pid], signal.SIGKILL)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_throttle_stops_client_apps_until_paid(tree):
    supernode, (executor, client_app) = tree
    assert (t.children(supernode), t.children(executor)) == ([executor], [client_app])
    throttle = Throttle(0.1)
    poll = partial(throttle.poll, supernode)
    wait_until(lambda: is_stopped(client_app), step_s=0.001, meanwhile=poll)
    assert [is_stopped(supernode), is_stopped(executor)] == [False, False]
    assert t.cpu_time_s(client_app) > 0
    wait_until(lambda: not is_stopped(client_app), step_s=0.001, meanwhile=poll)
    assert throttle.credit_s > 0


async def talk(mbps, payload, server=True):
    """Send a payload through a relay to a server that echoes it, and return what comes back."""

    async def echo(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    target, near = free_ports(2)
    servers = [await t.relay(near, target, mbps, mbps)]
    if server:
        servers.append(await asyncio.start_server(echo, "127.0.0.1", target))
    reader, writer = await asyncio.open_connection("127.0.0.1", near)
    writer.write(payload)
    if server:
        writer.write_eof()
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        for each in (writer, *servers):
            each.close()


@pytest.mark.parametrize("mbps", [float("inf"), 1e4])
def test_relay_changes_no_byte(mbps):
    payload = bytes(range(256)) * 2000
    assert asyncio.run(talk(mbps, payload)) == payload


def test_connections_of_a_device_share_its_link():
    link = t.LinkBucket(mbps=1.0)
    first = link.delay_s(125_000, now_s=10.0)
    second = link.delay_s(125_000, now_s=10.5)
    assert (first, second) == (1.0, 1.5)
    assert link.delay_s(125_000, now_s=100.0) == 1.0  # an idle link owes nothing
