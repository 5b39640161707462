"""More that goes wrong in real fleets: in the middle of a push, of the clock, of certificates.

As ``scenarios.py``; each starts a fleet of its own, with what it needs.
"""

import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

from flwr_hetero.fleet import DeviceProfile, certificates
from flwr_hetero_studies.faults import scenarios
from flwr_hetero_studies.faults.experiment import losses
from flwr_hetero_studies.faults.scenarios import NUM_NODES, come_back, start_fleet

SIZE, UPLINK_MBPS = 2_000_000, 4.0
"""8 MB take 16 s to be pushed, so that a node can be killed in the middle."""
DAY_S = 86_400


def killed_pushing(folder: Path) -> dict:
    """Kill node-3 while it sends its model; start it again until it is taken."""
    profiles = [DeviceProfile()] * 3 + [DeviceProfile(uplink_mbps=UPLINK_MBPS)]
    fleet = start_fleet(folder / "fleet", profiles)
    try:
        run = scenarios.Experiment(
            fleet, folder / "run", clients_per_round=4, num_server_rounds=6, size=SIZE
        )
        run.start().wait_round(1)
        log, node = fleet.folder / "logs" / "node-3.log", fleet.file.node("node-3")
        sent = log.read_text().count("Sending: train")
        run.wait("a push", lambda: log.read_text().count("Sending: train") > sent)
        time.sleep(4)  # a quarter of it
        done = log.read_text().count("Sent successfully")
        fleet.end_process(node.pid)
        back = come_back(run, "node-3", after_round=2)
        history = run.finish(900)
        return {"history": history, **losses(history, 6), **back, "pushed_before": done}
    finally:
        fleet.down()


def clock_jumps(folder: Path, days: int, where: str = "everywhere") -> dict:
    """Let the clocks of all machines, or of one, jump in the middle of a round."""
    folder.mkdir(parents=True, exist_ok=True)
    offset, library = folder / "offset", folder / "clock.so"
    offset.write_text("0\n")
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    faked = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    fleet = start_fleet(folder / "fleet", **(faked if where == "everywhere" else {}))
    try:
        if where != "everywhere":
            fleet.settings |= faked
            fleet.end_process(fleet.file.node(where).pid, signal.SIGTERM)
            fleet.start_node(where)
            fleet.wait_online([node.name for node in fleet.file.nodes])
        run = scenarios.Experiment(fleet, folder / "run", clients_per_round=4, work=1.0,
                                   num_server_rounds=6, timeout=60.0)  # fmt: skip
        run.start().wait_round(1)
        run.wait("nodes at work", lambda: bool(run.client_app("node-1")))
        offset.write_text(f"{days * DAY_S}\n")
        run.finish(900)
        alive = [node.name for node in fleet.file.nodes if fleet.is_alive(node.pid)]
        ended_after = run.round()
        if ended_after < 6:
            run.start(resume=True)
        history = run.finish(900)
        more = {"alive": alive, "ended_after": ended_after}
        return {"history": history, **losses(history, 6), **more}
    finally:
        fleet.down()


def certificate_expires(folder: Path) -> dict:
    """Restart the SuperLink with a certificate that has expired, and then with the next one.

    The SuperNodes end meanwhile, and are started again, as by their units.
    """
    fleet = start_fleet(folder / "fleet")
    try:
        run = scenarios.Experiment(fleet, folder / "run", clients_per_round=4, num_server_rounds=6)
        run.start().wait_round(2)
        reached, names = run.round(), [node.name for node in fleet.file.nodes]
        make_expired(fleet.folder / "keys")
        told, start_s = fleet.expiring(), time.monotonic()
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the end of the old ServerApp", lambda: not run.server_app())
        pids = [node.pid for node in fleet.file.nodes]
        run.wait("the end of the SuperNodes", lambda: not any(map(fleet.is_alive, pids)))
        logs = [(fleet.folder / "logs" / f"{name}.log").read_text() for name in names]
        said = all("certificate has expired" in log for log in logs)
        certificates.make_server_certificate(fleet.folder / "keys", ["127.0.0.1", "localhost"])
        fleet.end_process(fleet.file.superlink_pid)
        fleet.start_superlink()
        run.wait("the SuperLink to give the old SuperNodes up", lambda: not fleet.online())
        for name in names:
            come_back(run, name)
        run.start(resume=True).wait_round(reached + 1)
        redone_s = round(time.monotonic() - start_s, 1)
        history = run.finish()
        more = {"killed_after": reached, "redone_s": redone_s, "said": said, "told": told}
        return {"history": history, **losses(history, 6), **more}
    finally:
        fleet.down()


def make_expired(keys: Path) -> None:
    """Make a certificate as it will be when its days are over."""
    past = mock.Mock(now=lambda zone: datetime.now(UTC) - timedelta(days=9))
    with mock.patch.object(certificates, "datetime", past):
        certificates.make_server_certificate(keys, ["127.0.0.1", "localhost"], days=2)


def throttle_killed(folder: Path) -> dict:
    """Kill the throttle in the middle of a run: the node behind its relay is cut off."""
    profiles = [DeviceProfile()] * (NUM_NODES - 1) + [DeviceProfile(0.5, uplink_mbps=20.0)]
    fleet = start_fleet(folder / "fleet", profiles)
    try:
        run = scenarios.Experiment(fleet, folder / "run", clients_per_round=4, timeout=60.0,
                                   num_server_rounds=5)  # fmt: skip
        run.start().wait_round(1)
        fleet.end_process(fleet.file.throttle_pid)
        history = run.finish(900)
        return {"history": history, **losses(history, 5), "online": sorted(fleet.online())}
    finally:
        fleet.down()
