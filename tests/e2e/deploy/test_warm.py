"""A warm node over TLS: one process imports the app, and nothing grows with the messages.

What messages may do to the processes, and crashes: tests/fleet/test_warm.py.
"""

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import RealFleet
from flwr_hetero_studies.faults.fleet_run import FleetRun, command_of
from flwr_hetero_studies.real.throttle import descendants

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
APP = Path(__file__).with_name("warm_app")


@pytest.fixture
def fleet(tmp_path):
    """Start a fleet of one node."""
    fleet = RealFleet(tmp_path / "fleet")
    fleet.up(1)
    yield fleet
    fleet.down(keep=True)


def messages(run):
    """Return what has come of each message of a run so far."""
    path = run.folder / "messages.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def footprint(fleet):
    """Return the node's memory in kB, descriptors, processes and files."""
    node = fleet.file.nodes[0]
    # the last message's process is a zombie until the next one begins
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
        # or a process has ended meanwhile
        with suppress(OSError):
            footprints.append(footprint(fleet))
        return len(footprints) >= 20

    wait_until(look, timeout_s=60, step_s=0.05)
    return {key: min(values[key] for values in footprints) for key in footprints[0]}


def test_thousand_messages_without_growth(fleet, tmp_path):
    run = FleetRun(fleet, tmp_path / "run", APP, count=1000).start()
    run.wait("100 messages", lambda: len(messages(run)) >= 100)
    before = least_footprint(fleet)
    run.wait("900 messages", lambda: len(messages(run)) >= 900, 1800)
    after = least_footprint(fleet)
    print(f"\nafter 100 messages {before}, after 900 {after}")
    for key in ("descriptors", "processes", "files"):
        assert after[key] <= before[key], key
    # of which the SuperNode's own bookkeeping of times is a few
    assert after["kb"] - before["kb"] <= 4096
    run.finish()
    (parent,) = {message["imported-by"] for message in messages(run)}
    # The system gives the ids of ended processes to new ones, but not at once.
    pids = [message["pid"] for message in messages(run)]
    assert parent not in pids
    assert all(before != after for before, after in pairwise(pids))
    assert [message["count"] for message in messages(run)] == list(range(1000))
