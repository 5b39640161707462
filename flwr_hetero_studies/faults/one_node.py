"""Faults of one node: its key, certificate, clock and disk, lost power, and an interrupt."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr_hetero.fleet import RealFleet, certificates, processes
from flwr_hetero_studies.faults.fleet_run import FleetRun
from flwr_hetero_studies.faults.scenarios import (
    EQUAL,
    Found,
    fake_clock,
    fault,
    outcome_of,
    own_fleet,
)

TWO = EQUAL[:2]
ROUNDS = 8
DISK_KB = 64
FREE_KB = 8
"""Room for a part of the toy app only."""
PLAIN = {"engine": "fedavg", "clients_per_round": 2}
"""FedAvg, which asks both nodes in each round."""
START_S = 60.0
LINES = ("the disk of this node is full", "a half-installed app")
"""What a log says of a fault and of its repair."""


def starts(folder: Path, *, warm: bool) -> Found:
    """Start nodes that the SuperLink must refuse, or that cannot work; interrupt a good one."""
    with own_fleet(folder, EQUAL[:1], warm=warm) as fleet:
        keys = folder / "keys"
        certificates.make_node_key(keys, "stranger")
        certificates.make_authority(keys)
        no_room = folder / "no-room"
        key = {"--auth-supernode-private-key": str(keys / "stranger")}
        authority = {"--root-certificates": str(keys / certificates.CA_CERTIFICATE)}
        found = [
            refused("a node's key is not registered", fleet, folder, key),
            refused("a node has the ca.crt of another authority", fleet, folder, authority),
            refused("a node's clock is 400 s behind", fleet, folder, **fake_clock(folder, -400)),
            refused("a node's clock is 20 s ahead", fleet, folder, **fake_clock(folder, 20)),
            refused(
                "a node's clock is 3 days behind", fleet, folder, **fake_clock(folder, -259_200)
            ),
        ]
        with small_disk(no_room):
            fill(no_room, 0)
            what = "a node's disk is full when it starts"
            found.append(refused(what, fleet, folder, FLWR_HOME=str(no_room)))
        node = fleet.file.nodes[0]
        fleet.end_process(node.pid, signal.SIGTERM)
        found += [interrupted(number, fleet, folder) for number in (signal.SIGINT, signal.SIGTERM)]
        return {"faults": found}


def refused(
    what: str, fleet: RealFleet, folder: Path, changes: dict[str, str] | None = None, **more: str
) -> Found:
    """Start a node with other options or variables, and return how it ends and what it logs."""
    process, log = start_node(fleet, folder, changes or {}, more)
    status = process.wait(START_S)
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.partition(":")[2].strip() for line in lines if "ERROR" in line]
    line = errors[0].replace(str(folder), "...") if errors else "no line"
    return ended(what, status, "\n".join(lines), f"`{line}`")


def interrupted(number: int, fleet: RealFleet, folder: Path) -> Found:
    """Start a good node, interrupt it while it works, and return how it ends."""
    process, log = start_node(fleet, folder, {}, {})
    while process.poll() is None and "SuperNode ID" not in log.read_text(errors="replace"):
        time.sleep(0.1)
    # Ctrl-C in a terminal reaches all processes of its group.
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    status = process.wait(START_S)
    text = log.read_text(errors="replace")
    row = ended(f"a node gets {signal.Signals(number).name}", status, text, "no traceback")
    if "Traceback" in text:
        row |= {"reason": "Traceback (most recent call last)", "note": f"exit status {status}"}
    return row


def ended(what: str, status: int, log: str, said: str) -> Found:
    note = f"{said}; exit status {status}"
    return {"fault": what, "survived": True, "cost": "this node", "status": status, "note": note,
            "log": log}  # fmt: skip


def start_node(
    fleet: RealFleet, folder: Path, changes: dict[str, str], more: dict[str, str]
) -> "tuple[subprocess.Popen[bytes], Path]":
    file = fleet.file
    ports = {"--port": str(processes.free_ports(1)[0])}
    command = processes.supernode_command(fleet.folder, file, file.nodes[0])
    for option, value in (ports | changes).items():
        command[command.index(option) + 1] = value
    log = folder / f"node-{len(list(folder.glob('node-*.log')))}.log"
    environment = processes.environment(folder / "home") | fleet.settings | more
    return processes.start(command, fleet.folder, log, environment), log


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk, for which a process needs the rights of root."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(folder), "-o", f"size={DISK_KB}k"]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, free_kb: int) -> Path:
    """Write a file that leaves so much room; return it."""
    path = disk / "filler"
    path.write_bytes(bytes(1024 * (DISK_KB - free_kb)))
    return path


def disk_full_at_install(folder: Path, *, warm: bool) -> Found:
    """Let node-1's disk be full when it installs the app, and make room after a round."""
    with own_fleet(folder, TWO, warm=warm) as fleet:
        disk = fleet.folder / "homes" / "node-1"
        with small_disk(disk):
            filler = fill(disk, FREE_KB)
            run = FleetRun(fleet, folder / "run", num_server_rounds=ROUNDS, **PLAIN)
            run.start().wait_round(1)
            filler.unlink()
            log = fleet.folder / "logs" / "node-1.log"
            what = "a node's disk is full while it installs the app, and has room after a round"
            return mended(what, run, log)


def power_lost_at_install(folder: Path, *, warm: bool) -> Found:
    """Leave half of the app on node-1, as a loss of power does, and start the node again."""
    with own_fleet(folder, TWO, warm=warm) as fleet:
        FleetRun(fleet, folder / "before", num_server_rounds=1, **PLAIN).start().finish()
        fleet.end_process(fleet.file.node("node-1").pid, signal.SIGTERM)
        [app] = (fleet.folder / "homes" / "node-1" / "apps").iterdir()
        (app / "pyproject.toml").unlink()
        next(app.rglob("client_app.py")).write_bytes(b"")
        fleet.start_node("node-1")
        fleet.wait_online(["node-0", "node-1"])
        run = FleetRun(fleet, folder / "run", num_server_rounds=ROUNDS, **PLAIN).start()
        what = "a node lost power while it installed the app, and starts again"
        log = fleet.folder / "logs" / "node-1.log"
        return mended(what, run, log)


def mended(what: str, run: FleetRun, log: Path) -> Found:
    """Return what a fault of node-1 in round 1 cost, and which lines its log has about it."""
    run.finish()
    text = log.read_text(errors="replace")
    lines = [line for line in LINES if line in text]
    note = f"in its log: {', '.join(lines) or 'nothing'}"
    row = fault(what, 1, "node-1", note=note)
    return outcome_of(run, ROUNDS, row) | {"lines": lines}


ON_ONE_NODE = {
    "starts": starts,
    "disk_full_at_install": disk_full_at_install,
    "power_lost_at_install": power_lost_at_install,
}
