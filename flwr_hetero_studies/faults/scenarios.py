"""What goes wrong in real fleets, done to a real fleet of four SuperNodes; each returns what came.

The tests of real fleets assert on what is returned, ``cases.py`` writes it down.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.fleet.throttle import descendants
from flwr_hetero_studies.faults.experiment import Experiment, losses

NUM_NODES = 4
BAD_REPLIES = (
    "0:1:nan 1:1:raises 2:1:memory "
    "1:2:shape 2:2:missing 3:2:extra "
    "0:3:pickle 3:3:weight 1:3:metric "
    "2:4:latency"
)
"""Partition, round, fault; node-1 fails three times in a row, two good replies a round at least,
but in round 3 of two good ones, of which one has a metric that the other has not."""
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Flower's executors look for work four times a second, so that a round takes 3 s and not 5."""


def start_fleet(
    folder: Path,
    profiles: Sequence[DeviceProfile] = (DeviceProfile(),) * NUM_NODES,
    **settings: str,
) -> RealFleet:
    """Start a fleet whose SuperLink survives a restart; ``settings`` are of the environment."""
    fleet = RealFleet(folder, QUICK | settings)
    fleet.up(profiles, database=True)
    return fleet


def bad_replies(fleet: RealFleet, folder: Path) -> dict:
    """Let ClientApps raise, run out of memory, answer nonsense, claim an impossible latency."""
    run = Experiment(fleet, folder, clients_per_round=4, num_server_rounds=5, faults=BAD_REPLIES)
    history = run.start().finish()
    return {"history": history, **losses(history, 5), "log": run.tail(20_000)}


def frozen_and_stopped(fleet: RealFleet, folder: Path) -> dict:
    """Freeze node-1 past the time-out and thaw it; stop node-2 politely and start it again.

    The rounds are enough for node-1 to be asked again: a silent node is left alone for a while.
    """
    run = Experiment(
        fleet, folder, clients_per_round=4, num_server_rounds=14, timeout=30.0, work=0.5
    )
    run.start().wait_round(1)
    run.wait("node-1 at work", lambda: bool(run.client_app("node-1")))
    frozen = [fleet.file.node("node-1").pid, *descendants(fleet.file.node("node-1").pid)]
    _send(frozen, signal.SIGSTOP)
    fleet.end_process(fleet.file.node("node-2").pid, signal.SIGTERM)
    fleet.start_node("node-2")
    run.wait_round(2)
    _send(frozen, signal.SIGCONT)
    history = run.finish()
    return {"history": history, **losses(history, 14)}


def killed_and_joined(fleet: RealFleet, folder: Path) -> dict:
    """Kill node-1, which comes back; let node-2's ClientApp be killed and node-3 join late."""
    fleet.end_process(fleet.file.node("node-3").pid, signal.SIGTERM)
    run = Experiment(
        fleet, folder, clients_per_round=4, num_server_rounds=8, work=0.5, faults="2:2:dies"
    )
    run.start().wait_round(1)
    run.wait("node-1 at work", lambda: bool(run.client_app("node-1")))
    fleet.end_process(fleet.file.node("node-1").pid)
    fleet.start_node("node-3")
    found = come_back(run, "node-1", after_round=2)
    history = run.finish()
    return {"history": history, **losses(history, 8), **found}


def come_back(run: Experiment, node: str, after_round: int = 0) -> dict:
    """Start a SuperNode until the SuperLink takes it, as systemd does: Restart=always."""
    fleet, start_s, starts, alive = run.fleet, time.monotonic(), 0, False
    while not (alive and run.round() >= after_round and node in fleet.online()):
        if run.is_over() and after_round:
            break
        alive = fleet.is_alive(fleet.file.node(node).pid)
        if not alive:
            starts += 1
            fleet.start_node(node)
        time.sleep(2)
    return {"back_s": round(time.monotonic() - start_s), "starts": starts}


def server_app_killed(fleet: RealFleet, folder: Path, after_round: int = 2) -> dict:
    """Kill the ServerApp in the middle of a round and resume the run at once."""
    run = Experiment(fleet, folder, clients_per_round=2, num_server_rounds=6)
    run.start().wait_round(after_round)
    _send(run.server_app(), signal.SIGKILL)
    reached, start_s = run.round(), time.monotonic()
    run.start(resume=True).wait_round(reached + 1)
    redone_s = round(time.monotonic() - start_s, 1)
    history = run.finish()
    info = {"killed_after": reached, "redone_s": redone_s}
    return {"history": history, **losses(history, 6), **info}


def superlink_restarted(fleet: RealFleet, folder: Path) -> dict:
    """Kill the SuperLink in the middle of a round, start it again, and resume the run."""
    run = Experiment(fleet, folder, clients_per_round=2, num_server_rounds=6)
    run.start().wait_round(2)
    reached = run.round()
    start_s = time.monotonic()
    fleet.end_process(fleet.file.superlink_pid)
    fleet.start_superlink()
    fleet.wait_online([node.name for node in fleet.file.nodes])
    back_s = round(time.monotonic() - start_s)
    run.wait("the end of the old ServerApp", lambda: not run.server_app())
    run.start(resume=True).wait_round(reached + 1)
    redone_s = round(time.monotonic() - start_s, 1)
    history = run.finish()
    info = {"killed_after": reached, "back_s": back_s, "redone_s": redone_s}
    return {"history": history, **losses(history, 6), **info}


def _send(pids: list[int], signal_number: int) -> None:
    for pid in pids:
        os.kill(pid, signal_number)
