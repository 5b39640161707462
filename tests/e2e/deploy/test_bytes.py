"""Bytes on the sockets of real SuperNodes, TLS and all, beside those that the history counts."""

import pytest

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import QUICK
from flwr_hetero_studies.real import throttle

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
SIZE = 1_000_000  # values of the model
ROUNDS = 3
POLLS = 1_500_000  # bytes of some minutes in which nodes ask for messages


class Meter(throttle.LinkBucket):
    """One direction of a link, which counts what passes."""

    def __init__(self, mbps):
        super().__init__(mbps)
        self.bytes = 0

    def delay_s(self, num_bytes, now_s):
        self.bytes += num_bytes
        return super().delay_s(num_bytes, now_s)


@pytest.fixture
def metered_fleet(tmp_path, monkeypatch):
    """Give two SuperNodes with links that limit nothing, and the meters: up and down of each."""
    meters = []

    def metered(mbps):
        meters.append(Meter(mbps))
        return meters[-1]

    monkeypatch.setattr(throttle, "LinkBucket", metered)
    profiles = [DeviceProfile(1.0, 1e6, 1e6)] * 2
    fleet = throttle.ThrottledFleet(tmp_path / "fleet", profiles, QUICK)
    try:
        fleet.start()
        yield fleet, meters
    finally:
        fleet.down(keep=True)


def bytes_of(fleet, meters, folder, packed):
    """Run FedAvg; return bytes up and down, of the sockets and of the history."""
    before = passed(meters)
    config = {"engine": "fedavg", "size": SIZE, "num_server_rounds": ROUNDS, "timeout": 300.0}
    run = FleetRun(fleet, folder, packed=packed, **config)
    history = run.start().finish()
    assert [record["round"] for record in history] == list(range(ROUNDS + 1)), run.tail()
    assert not any(record["failures"] for record in history)
    counted = [sum(record[key] for record in history) for key in ("bytes_up", "bytes_down")]
    return [now - then for now, then in zip(passed(meters), before, strict=True)], counted


def passed(meters):
    return [sum(meter.bytes for meter in meters[way::2]) for way in range(2)]


def test_sockets_carry_what_the_history_counts(metered_fleet, tmp_path):
    found = [bytes_of(*metered_fleet, tmp_path / str(i), packed=bool(i)) for i in range(2)]
    print(f"bytes up and down, of sockets and of the history: {found}")
    for sockets, counted in found:
        for carried, told in zip(sockets, counted, strict=True):
            # a SuperNode asks for messages all the time
            assert told < carried < 1.02 * told + POLLS
    ((whole_up, whole_down), _), ((up, down), _) = found
    assert up < whole_up / 4
    # the first model of a fleet is whole
    assert down < whole_down * (1 / ROUNDS + 1 / 4)
