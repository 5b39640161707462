"""A warm node over TLS: nothing grows with its messages.

What messages may do to the processes, and crashes: tests/fleet/test_warm.py.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import RealFleet
from flwr_hetero_studies.faults.fleet_run import FleetRun, command_of
from flwr_hetero_studies.real.throttle import descendants

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
MESSAGES = 300


@pytest.fixture
def fleet(tmp_path):
    fleet = RealFleet(tmp_path / "fleet")
    fleet.up(2)
    yield fleet
    fleet.down(keep=True)


def footprint(fleet):
    """Return a node's memory in kB, descriptors, processes and files."""
    node = fleet.file.nodes[0]
    # The last message's process is a zombie until the next one begins.
    pids = [pid for pid in (node.pid, *descendants(node.pid)) if command_of(pid)]
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    kb = [int(s.split("VmRSS:")[1].split()[0]) for s in statuses if "VmRSS:" in s]
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    files = sum(1 for path in (fleet.folder / "homes" / node.name).rglob("*"))
    return {"kb": sum(kb), "descriptors": descriptors, "processes": len(pids), "files": files}


def least_footprint(fleet):
    """Return the least of several footprints, in which no message was under way."""
    footprints = []

    def look():
        # A process may have ended meanwhile.
        with suppress(OSError):
            footprints.append(footprint(fleet))
        return len(footprints) >= 20

    wait_until(look, timeout_s=60, step_s=0.05)
    return {key: min(values[key] for values in footprints) for key in footprints[0]}


def test_many_messages_without_growth(fleet, tmp_path):
    run = FleetRun(fleet, tmp_path / "run", engine="fedavg", num_server_rounds=MESSAGES).start()
    run.wait_round(MESSAGES // 10)
    before = least_footprint(fleet)
    run.wait("most messages", lambda: run.round() >= 9 * MESSAGES // 10, 1800)
    after = least_footprint(fleet)
    print(f"\nfirst {before}, then {after}")
    for key in ("descriptors", "processes", "files"):
        assert after[key] <= before[key], key
    # The SuperNode's own bookkeeping of times takes a few kB.
    assert after["kb"] - before["kb"] <= 4096
    assert len(run.finish()) == MESSAGES + 1
