"""Bytes on the sockets of real SuperNodes, TLS and all, beside those that the history counts."""

import asyncio
import threading
from dataclasses import replace

import pytest

from flwr_hetero.fleet import DeviceProfile, RealFleet, processes, throttle
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
SIZE = 1_000_000  # values of the model
ROUNDS = 3
POLLS = 1_500_000  # bytes of some minutes in which nodes ask for messages


class Meter(throttle.LinkBucket):
    """One direction of a link without a limit, which counts what passes."""

    def __init__(self, mbps):
        super().__init__(mbps)
        self.bytes = 0

    def delay_s(self, num_bytes, now_s):
        self.bytes += num_bytes
        return super().delay_s(num_bytes, now_s)


@pytest.fixture
def metered_fleet(tmp_path, monkeypatch):
    """Give two SuperNodes behind a relay, and its meters: up and down."""
    meters = []
    servers = []
    loop = asyncio.new_event_loop()
    command = processes.supernode_command
    (port,) = processes.free_ports(1)

    def metered(mbps):
        meters.append(Meter(mbps))
        return meters[-1]

    def in_loop(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def behind_the_relay(folder, fleet, node):
        if not servers:
            servers.append(in_loop(throttle.relay(port, fleet.port, float("inf"), float("inf"))))
        return command(folder, replace(fleet, port=port), node)

    async def close():
        for server in servers:
            server.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    monkeypatch.setattr(throttle, "LinkBucket", metered)
    monkeypatch.setattr(processes, "supernode_command", behind_the_relay)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fleet = RealFleet(tmp_path / "fleet", QUICK)
    try:
        fleet.up([DeviceProfile()] * 2)
        yield fleet, meters
    finally:
        fleet.down(keep=True)
        in_loop(close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def bytes_of(fleet, meters, folder, packed):
    """Run FedAvg; return bytes up and down, of the sockets and of the history."""
    before = [meter.bytes for meter in meters]
    config = {"engine": "fedavg", "size": SIZE, "num_server_rounds": ROUNDS, "timeout": 300.0}
    run = FleetRun(fleet, folder, packed=packed, **config)
    history = run.start().finish()
    assert [record["round"] for record in history] == list(range(ROUNDS + 1)), run.tail()
    assert not any(record["failures"] for record in history)
    counted = [sum(record[key] for record in history) for key in ("bytes_up", "bytes_down")]
    return [m.bytes - b for m, b in zip(meters, before, strict=True)], counted


def test_sockets_carry_what_the_history_counts(metered_fleet, tmp_path):
    found = [bytes_of(*metered_fleet, tmp_path / str(i), packed=bool(i)) for i in range(2)]
    print(f"bytes up and down, of sockets and of the history: {found}")
    for sockets, counted in found:
        for passed, told in zip(sockets, counted, strict=True):
            # a SuperNode asks for messages all the time
            assert told < passed < 1.02 * told + POLLS
    ((whole_up, whole_down), _), ((up, down), _) = found
    assert up < whole_up / 4
    # the first model of a fleet is whole
    assert down < whole_down * (1 / ROUNDS + 1 / 4)
