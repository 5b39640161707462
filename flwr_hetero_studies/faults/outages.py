"""More that goes wrong in real fleets: in the middle of a push, of the clock, of certificates.

As ``scenarios.py``; each starts a fleet of its own, with what it needs.
"""

import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from unittest import mock

from flwr_hetero.fleet import DeviceProfile, certificates
from flwr_hetero_studies.faults import scenarios
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import EQUAL, Found, fault, own_fleet

SIZE, UPLINK_MBPS = 2_000_000, 4.0
"""8 MB take 16 s to be pushed, so that a node can be killed in the middle."""
ALL = tuple(f"node-{i}" for i in range(len(EQUAL)))


def killed_pushing(folder: Path) -> Found:
    """Kill node-3 while it sends its model; start it again until it is taken."""
    with own_fleet(folder, [*EQUAL[1:], DeviceProfile(uplink_mbps=UPLINK_MBPS)]) as fleet:
        run = FleetRun(fleet, folder / "run", clients_per_round=4, num_server_rounds=6, size=SIZE)
        run.start().wait_round(1)
        log, node = fleet.folder / "logs" / "node-3.log", fleet.file.node("node-3")
        sent = log.read_text().count("Sending: train")
        run.wait("a push", lambda: log.read_text().count("Sending: train") > sent)
        # a quarter of the push
        time.sleep(4)
        fleet.end_process(node.pid)
        note = scenarios.come_back(run, "node-3", after_round=2)
        pushing = fault("SuperNode killed while it sends 8 MB", 2, "node-3", note=note)
        return scenarios.told(run, 6, pushing)


def clock_jumps(what: str, days: int, nodes: tuple[str, ...], folder: Path) -> Found:
    """Let the clocks of all machines, or of one, jump in the middle of a round."""
    folder.mkdir(parents=True, exist_ok=True)
    offset, library = folder / "offset", folder / "clock.so"
    offset.write_text("0\n")
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    faked = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    with own_fleet(folder, **(faked if nodes == ALL else {})) as fleet:
        if nodes != ALL:
            # the clock is preloaded when the process starts
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
        if (last := run.round()) < 6:
            note += f"; the run ended after round {last}: `resume=true`"
            run.start(resume=True)
        jumped = fault(f"{what} in the middle of a round", 2, *nodes, note=note)
        return scenarios.told(run, 6, jumped)


def certificate_expires(folder: Path) -> Found:
    """Restart the SuperLink with a certificate that has expired, and then with the next one."""
    with own_fleet(folder) as fleet:
        run = FleetRun(fleet, folder / "run", clients_per_round=4, num_server_rounds=6)
        run.start().wait_round(2)
        reached = run.round()
        keys, hosts = fleet.folder / "keys", ["127.0.0.1", "localhost"]
        past = mock.Mock(now=lambda zone: datetime.now(UTC) - timedelta(days=9))
        with mock.patch.object(certificates, "datetime", past):
            certificates.make_server_certificate(keys, hosts, days=2)
        start_s = time.monotonic()
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the end of the old ServerApp", lambda: not run.server_app())
        pids = [node.pid for node in fleet.file.nodes]
        # Flower's SuperNodes give up on a certificate that they cannot trust
        run.wait("the end of the SuperNodes", lambda: not any(map(fleet.is_alive, pids)))
        logs = [(fleet.folder / "logs" / f"{name}.log").read_text() for name in ALL]
        said = all("certificate has expired" in log for log in logs)
        certificates.make_server_certificate(keys, hosts)
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the SuperLink to give the old SuperNodes up", lambda: not fleet.online())
        for name in ALL:
            scenarios.come_back(run, name)
        why = "`certificate has expired`" if said else "no word of the certificate"
        what = "SuperLink restarted with an expired certificate, then with a new one"
        before = f"all SuperNodes ended, {why} in their logs; "
        return scenarios.resumed(run, what, reached, start_s, before) | {"said": said}


def throttle_killed(folder: Path) -> Found:
    """Kill the throttle in the middle of a run: the node behind its relay is cut off."""
    with own_fleet(folder, [*EQUAL[1:], DeviceProfile(0.5, uplink_mbps=20.0)]) as fleet:
        config = {"clients_per_round": 4, "num_server_rounds": 5, "timeout": 60.0}
        run = FleetRun(fleet, folder / "run", **config)
        run.start().wait_round(1)
        fleet.end_process(fleet.file.throttle_pid)
        run.finish()
        note = f"online in the end: {', '.join(sorted(fleet.online()))}"
        what = "throttle of `fleet up` killed, which is the relay of node-3"
        return scenarios.told(run, 5, fault(what, 2, "node-3", note=note))


OWN_FLEET = {
    "killed_pushing": killed_pushing,
    "clocks_ahead": partial(clock_jumps, "all clocks a day ahead", 1, ALL),
    "clocks_back": partial(clock_jumps, "all clocks a day back", -1, ALL),
    "clock_ahead": partial(clock_jumps, "one node's clock a day ahead", 1, ("node-1",)),
    "certificate_expires": certificate_expires,
    "throttle_killed": throttle_killed,
}
