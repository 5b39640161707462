"""Warm nodes over TLS: what a message costs, and what does not grow.

Processes that are killed, and crashes: tests/fleet/test_warm.py.
"""

import json
import os
import statistics
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.throttle import descendants
from flwr_hetero_studies.faults.fleet_run import FleetRun, command_of

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
APP = Path(__file__).with_name("warm_app")
QUIET_LOAD = 0.5
"""Load of the machine per core below which seconds are held against a bar."""


@pytest.fixture
def one_node(tmp_path):
    """Return what starts a fleet of one node; all of them are ended."""
    fleets = []

    def up(name, **options):
        fleets.append(RealFleet(tmp_path / name))
        fleets[-1].up([DeviceProfile()], **options)
        return fleets[-1]

    yield up
    for fleet in fleets:
        fleet.down(keep=True)


def messages(run):
    """Return what has come of each message of a run so far."""
    path = run.folder / "messages.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(run, timeout_s=900):
    run.start().wait("the end of the run", run.is_over, timeout_s)
    found = messages(run)
    assert len(found) == run.config["count"], run.tail()
    return found


def median_s(found, skip):
    """Return the median seconds of a message; the first one loads the app."""
    return statistics.median(message["seconds"] for message in found[skip:])


def is_quiet():
    return os.getloadavg()[0] / os.cpu_count() < QUIET_LOAD


def test_message_costs_a_twelfth_of_flowers(one_node, tmp_path):
    quiet = is_quiet()
    found = {}
    for name, warm, count in (("cold", False, 8), ("warm", True, 24)):
        fleet = one_node(name, warm=warm)
        found[name] = finished(FleetRun(fleet, tmp_path / f"run-{name}", APP, count=count))
        fleet.down(keep=True)
    assert all(message["imported-by"] == message["pid"] for message in found["cold"])
    (parent,) = {message["imported-by"] for message in found["warm"]}
    assert len({message["pid"] for message in found["warm"]} - {parent}) == 24
    for each in found.values():
        assert [message["count"] for message in each] == list(range(len(each)))
    cold_s = median_s(found["cold"], 1)
    warm_s = median_s(found["warm"], 1)
    print(f"\na message: cold {cold_s:.2f} s, warm {warm_s:.3f} s, ratio {cold_s / warm_s:.1f}")
    assert cold_s / warm_s >= 12
    assert warm_s <= 0.5 or not quiet


def test_message_on_a_tenth_of_a_core(one_node, tmp_path):
    quiet = is_quiet()
    found = finished(FleetRun(one_node("slow", cpu=0.1), tmp_path / "run", APP, count=16))
    seconds = median_s(found, 1)
    print(f"\na message at a tenth of a core: {seconds:.2f} s")
    assert seconds <= 2 or not quiet


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


def least(fleet):
    """Return the least of several footprints, in which no message was under way."""
    found = []

    def look():
        # or a process has ended meanwhile
        with suppress(OSError):
            found.append(footprint(fleet))
        return len(found) >= 20

    wait_until(look, timeout_s=60, step_s=0.05)
    return {key: min(each[key] for each in found) for key in found[0]}


def test_thousand_messages_without_growth(one_node, tmp_path):
    fleet = one_node("many")
    run = FleetRun(fleet, tmp_path / "run", APP, count=1000).start()
    run.wait("100 messages", lambda: len(messages(run)) >= 100)
    before = least(fleet)
    run.wait("900 messages", lambda: len(messages(run)) >= 900, 1800)
    after = least(fleet)
    print(f"\nafter 100 messages {before}, after 900 {after}")
    for key in ("descriptors", "processes", "files"):
        assert after[key] <= before[key], key
    # of which the SuperNode's own bookkeeping of times is a few
    assert after["kb"] - before["kb"] <= 4096
    run.finish()
    assert not [message for message in messages(run) if "error" in message]
