import asyncio
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.processes import FleetFile, SuperNodeSpec, free_ports, listens
from flwr_hetero_studies.real import throttle as t
from flwr_hetero_studies.real.throttle import BURST_S, LinkBucket, Throttle, ThrottledFleet

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


async def talk(payload):
    """Send a payload through a relay to a server that echoes it, and return what comes back."""

    async def echo(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    target, near = free_ports(2)
    servers = [await t.relay(near, target, LinkBucket(1e4), LinkBucket(1e4))]
    servers.append(await asyncio.start_server(echo, "127.0.0.1", target))
    reader, writer = await asyncio.open_connection("127.0.0.1", near)
    writer.write(payload)
    writer.write_eof()
    try:
        return await reader.read(-1)
    finally:
        for each in (writer, *servers):
            each.close()


def test_relay_changes_no_byte():
    payload = bytes(range(256)) * 2000
    assert asyncio.run(talk(payload)) == payload


def test_connections_of_a_device_share_its_link():
    link = LinkBucket(mbps=1.0)
    first = link.delay_s(125_000, now_s=10.0)
    second = link.delay_s(125_000, now_s=10.5)
    assert (first, second) == (1.0, 1.5)
    assert link.delay_s(125_000, now_s=100.0) == 1.0  # an idle link owes nothing


def test_fleet_limits_nodes_as_their_profiles_say(tmp_path, monkeypatch):
    def up(fleet, num_nodes):
        nodes = [
            SuperNodeSpec(f"node-{i}", 1, port) for i, port in enumerate(free_ports(num_nodes))
        ]
        FleetFile(port=1, nodes=nodes).save(tmp_path)
        for node in nodes:
            fleet.start_node(node.name)

    started = []
    monkeypatch.setattr(RealFleet, "up", up)
    monkeypatch.setattr(RealFleet, "start_node", lambda fleet, name: started.append(name))
    profiles = [DeviceProfile(4.0), DeviceProfile(1.0, uplink_mbps=20.0)]
    fleet = ThrottledFleet(tmp_path, profiles, cpu=0.5)
    fleet.start()
    shares = {name: throttle.share for name, throttle in fleet.throttles.items()}
    assert shares == {"node-0": 0.5, "node-1": 0.125}
    assert started == ["node-0", "node-1"]
    whole, relayed = (node.superlink_port for node in fleet.file.nodes)
    assert whole == 1
    assert listens(relayed)
    assert fleet.down() == 0
    assert not listens(relayed)
