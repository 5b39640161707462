"""Faults that are caused in a real fleet of four SuperNodes.

Each function returns what came of a run. The tests of real fleets assert on it, and ``cases.py``
records its ``faults``, each of which is a row of the table.
"""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from flwr_hetero.fleet import DeviceProfile, RealFleet, certificates
from flwr_hetero_studies.faults.fleet_run import FleetRun, durations, losses
from flwr_hetero_studies.real.throttle import ThrottledFleet, descendants, send

Found = dict[str, Any]

EQUAL = (DeviceProfile(),) * 4
ALL = tuple(f"node-{i}" for i in range(len(EQUAL)))
SIZE = 2_000_000
UPLINK_MBPS = 4.0
"""A model of 8 MB takes 16 s to send, so that a node can be killed in the middle."""
BAD_REPLIES = ("0:1:nan 1:1:raises 2:1:memory 1:2:shape 2:2:missing 3:2:extra "
               "0:3:pickle 3:3:weight 1:3:metric 2:4:latency")  # fmt: skip
"""Partition, round and fault of each bad reply. node-1 fails three times in a row."""
KINDS = {"nan": "reply holds NaN", "raises": "ClientApp raises", "shape": "array of another shape",
         "memory": "ClientApp asks for more memory than there is",
         "missing": "array is missing", "extra": "array too many", "pickle": "payload is a pickle",
         "weight": "infinite number of examples", "metric": "metric that the others have not",
         "latency": "claims a latency of 1e6 s", "steps": "claims 2**62 steps"}  # fmt: skip
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Flower's executors look for work four times a second, so that a round takes 3 s instead of 5."""


@contextmanager
def own_fleet(
    folder: Path, profiles: Sequence[DeviceProfile] = EQUAL, *, warm: bool = True, **settings: str
) -> Iterator[RealFleet]:
    """Start a fleet whose SuperLink survives a restart; ``settings`` go to the environment."""
    fleet = ThrottledFleet(folder / "fleet", profiles, QUICK | settings)
    fleet.start(database=True, warm=warm)
    try:
        yield fleet
    finally:
        fleet.down()


def outcome_of(run: FleetRun, rounds: int, *rows: Found, **more: Any) -> Found:
    """Return what came of a run, and what each fault cost, unless its row says otherwise."""
    history = run.finish()
    lost = losses(history, rounds)
    times = durations(history)
    failed = [(r["round"], f["node"], f["reason"]) for r in history for f in r["failures"]]
    # The loss of another fault, which comes later, is no loss of this one.
    struck = {(row["round"], node) for row in rows for node in row["nodes"]}
    faults = []
    for row in rows:
        number = row["round"]
        nodes = row["nodes"]
        reasons = [why for when, node, why in failed if when == number and node in nodes]
        after = {(when, node) for when, node, _ in failed if when > number + 1 and node in nodes}
        counted = {"injected": len(nodes), "survived": lost["survived"],
                   "replies_lost": len(reasons), "rounds_lost": int(not history[number]["train"]),
                   "seconds_lost": round(max(0.0, times[number] - lost["usual_round_s"]), 1),
                   "usual_round_s": lost["usual_round_s"], "lost_later": len(after - struck),
                   "reason": reasons[0][:80] if reasons else ""}  # fmt: skip
        faults.append(counted | {key: value for key, value in row.items() if key != "nodes"})
    return {"history": history, "faults": faults, **lost, **more}


def fault(what: str, number: int, *nodes: str, **more: Any) -> Found:
    return {"fault": what, "round": number, "nodes": nodes, **more}


def bad_replies(fleet: RealFleet, folder: Path) -> Found:
    """Let ClientApps raise, run out of memory, answer nonsense, claim an impossible latency."""
    config = {"clients_per_round": 4, "num_server_rounds": 5}
    run = FleetRun(fleet, folder, faults=BAD_REPLIES, **config).start()
    words = [word.split(":") for word in BAD_REPLIES.split()]
    rows = [fault(KINDS[kind], int(number), f"node-{node}") for node, number, kind in words]
    return outcome_of(run, 5, *rows) | {"log": run.tail(20_000)}


def frozen_and_stopped(fleet: RealFleet, folder: Path) -> Found:
    """Freeze node-1 past the time-out and thaw it; stop node-2 politely and start it again."""
    # A silent node is backed off, so it takes many rounds until node-1 is asked again.
    run = FleetRun(fleet, folder, clients_per_round=4, num_server_rounds=14, timeout=30.0, work=2.0)
    run.start().wait_round(1)
    # The node must be frozen in the middle of its training, not between two rounds.
    run.wait("node-1 at work", lambda: bool(run.client_app("node-1")))
    pids = [fleet.file.node("node-1").pid, *descendants(fleet.file.node("node-1").pid)]
    send(pids, signal.SIGSTOP)
    fleet.end_process(fleet.file.node("node-2").pid, signal.SIGTERM)
    fleet.start_node("node-2")
    run.wait_round(2)
    send(pids, signal.SIGCONT)
    frozen = fault("SuperNode frozen past the time-out of 30 s, then thawed", 2, "node-1")
    stopped = fault("SuperNode stopped politely and started again", 2, "node-2")
    return outcome_of(run, 14, frozen, stopped)


def killed_and_joined(fleet: RealFleet, folder: Path) -> Found:
    """Kill node-1, which comes back; let node-2's ClientApp be killed and node-3 join late."""
    fleet.end_process(fleet.file.node("node-3").pid, signal.SIGTERM)
    sizes = {"clients_per_round": 4, "num_server_rounds": 8}
    run = FleetRun(fleet, folder, **sizes, work=2.0, faults="2:2:dies").start()
    run.wait_round(1)
    run.wait("node-1 at work", lambda: bool(run.client_app("node-1")))
    fleet.end_process(fleet.file.node("node-1").pid)
    fleet.start_node("node-3")
    note = come_back(run, "node-1", after_round=2)
    history = run.finish()
    joined = next(r["round"] for r in history[1:] if "node-3" in r["selected"])
    killed = fault("SuperNode killed, started again under its key", 2, "node-1", note=note)
    late = {"injected": 1, "note": f"trains from round {joined} on"}
    newcomer = fault("a node joins during the run", joined, **late)
    return outcome_of(run, 8, killed, fault("ClientApp killed", 2, "node-2"), newcomer)


def come_back(run: FleetRun, node: str, after_round: int = 0) -> str:
    """Start a SuperNode, as systemd does, until the SuperLink takes it; write how long it took."""
    fleet = run.fleet
    start_s = time.monotonic()
    starts = 0
    alive = False
    while not (alive and run.round() >= after_round and node in fleet.online()):
        # The run has ended without this node.
        if run.is_over() and after_round:
            break
        alive = fleet.is_alive(fleet.file.node(node).pid)
        if not alive:
            starts += 1
            fleet.start_node(node)
        time.sleep(2)
    return f"back online after {time.monotonic() - start_s:.0f} s, {starts} starts"


def resumed(run: FleetRun, what: str, reached: int, start_s: float, before: str = "") -> Found:
    """Resume a run that ended after a round, and return what that cost."""
    run.start(resume=True).wait_round(reached + 1)
    redone_s = time.monotonic() - start_s
    usual_s = losses(run.finish(), 6)["usual_round_s"]
    note = f"{before}round {reached + 1} is done again after `resume=true`"
    more = {"injected": 1, "rounds_lost": 1, "seconds_lost": round(max(0.0, redone_s - usual_s), 1)}
    return outcome_of(run, 6, fault(what, reached + 1, note=note, **more), killed_after=reached)


def server_app_killed(fleet: RealFleet, folder: Path) -> Found:
    """Kill the ServerApp in the middle of a round and resume the run at once."""
    run = FleetRun(fleet, folder, clients_per_round=2, num_server_rounds=6)
    run.start().wait_round(2)
    # The signal leaves no chance to save anything.
    send(run.server_app(), signal.SIGKILL)
    return resumed(run, "ServerApp killed", run.round(), time.monotonic())


def superlink_restarted(fleet: RealFleet, folder: Path) -> Found:
    """Kill the SuperLink in the middle of a round, start it again, and resume the run."""
    run = FleetRun(fleet, folder, clients_per_round=2, num_server_rounds=6)
    run.start().wait_round(2)
    reached = run.round()
    start_s = time.monotonic()
    fleet.end_process(fleet.file.superlink_pid)
    fleet.start_superlink()
    fleet.wait_online([node.name for node in fleet.file.nodes])
    # Otherwise two ServerApps would write to one run directory.
    run.wait("the end of the old ServerApp", lambda: not run.server_app())
    return resumed(run, "SuperLink killed and started again with its database", reached, start_s)


EVERY = bad_replies, frozen_and_stopped, killed_and_joined, server_app_killed, superlink_restarted
ON_A_FLEET = {scenario.__name__: scenario for scenario in EVERY}


def killed_pushing(folder: Path, *, warm: bool) -> Found:
    """Kill node-3 while it sends its model; start it again until it is taken."""
    nodes = [*EQUAL[1:], DeviceProfile(uplink_mbps=UPLINK_MBPS)]
    with own_fleet(folder, nodes, warm=warm) as fleet:
        run = FleetRun(fleet, folder / "run", clients_per_round=4, num_server_rounds=6, size=SIZE)
        run.start().wait_round(1)
        log = fleet.folder / "logs" / "node-3.log"
        node = fleet.file.node("node-3")
        sent = log.read_text().count("Sending: train")
        run.wait("a push", lambda: log.read_text().count("Sending: train") > sent)
        # By now a quarter of the model has been sent.
        time.sleep(4)
        fleet.end_process(node.pid)
        note = come_back(run, "node-3", after_round=2)
        pushing = fault("SuperNode killed while it sends 8 MB", 2, "node-3", note=note)
        return outcome_of(run, 6, pushing)


def clock_jumps(what: str, days: int, nodes: tuple[str, ...], folder: Path, *, warm: bool) -> Found:
    """Let the clocks of all machines, or of one, jump in the middle of a round."""
    folder.mkdir(parents=True, exist_ok=True)
    offset = folder / "offset"
    library = folder / "clock.so"
    offset.write_text("0\n")
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    faked = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    everywhere = faked if nodes == ALL else {}
    with own_fleet(folder, warm=warm, **everywhere) as fleet:
        if nodes != ALL:
            # The library is loaded when the process starts.
            fleet.settings |= faked
            fleet.end_process(fleet.file.node(nodes[0]).pid, signal.SIGTERM)
            fleet.start_node(nodes[0])
            fleet.wait_online(list(ALL))
        config = {"clients_per_round": 4, "num_server_rounds": 6, "work": 1.0, "timeout": 60.0}
        run = FleetRun(fleet, folder / "run", **config)
        run.start().wait_round(1)
        run.wait("nodes at work", lambda: bool(run.client_app("node-1")))
        offset.write_text(f"{days * 86_400}\n")
        run.finish()
        gone = [node.name for node in fleet.file.nodes if not fleet.is_alive(node.pid)]
        note = f"ended: {', '.join(gone)}" if gone else "no SuperNode ended"
        last = run.round()
        if last < 6:
            note += f"; the run ended after round {last}: `resume=true`"
            run.start(resume=True)
        jumped = fault(f"{what} in the middle of a round", 2, *nodes, note=note)
        return outcome_of(run, 6, jumped)


def certificate_expires(folder: Path, *, warm: bool) -> Found:
    """Restart the SuperLink with a certificate that has expired, and then with the next one."""
    with own_fleet(folder, warm=warm) as fleet:
        run = FleetRun(fleet, folder / "run", clients_per_round=4, num_server_rounds=6)
        run.start().wait_round(2)
        reached = run.round()
        keys = fleet.folder / "keys"
        hosts = ["127.0.0.1", "localhost"]
        past = mock.Mock(now=lambda zone: datetime.now(UTC) - timedelta(days=9))
        with mock.patch.object(certificates, "datetime", past):
            certificates.make_server_certificate(keys, hosts, days=2)
        start_s = time.monotonic()
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the end of the old ServerApp", lambda: not run.server_app())
        pids = [node.pid for node in fleet.file.nodes]
        # Flower's SuperNodes end when they cannot trust the certificate.
        run.wait("the end of the SuperNodes", lambda: not any(map(fleet.is_alive, pids)))
        logs = [(fleet.folder / "logs" / f"{name}.log").read_text() for name in ALL]
        said = all("certificate has expired" in log for log in logs)
        certificates.make_server_certificate(keys, hosts)
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the SuperLink to forget the old SuperNodes", lambda: not fleet.online())
        for name in ALL:
            come_back(run, name)
        why = "`certificate has expired`" if said else "no word of the certificate"
        what = "SuperLink restarted with an expired certificate, then with a new one"
        before = f"all SuperNodes ended, {why} in their logs; "
        return resumed(run, what, reached, start_s, before) | {"said": said}


OWN_FLEET = {
    "killed_pushing": killed_pushing,
    "clocks_ahead": partial(clock_jumps, "all clocks a day ahead", 1, ALL),
    "clocks_back": partial(clock_jumps, "all clocks a day back", -1, ALL),
    "clock_ahead": partial(clock_jumps, "one node's clock a day ahead", 1, ("node-1",)),
    "certificate_expires": certificate_expires,
}
