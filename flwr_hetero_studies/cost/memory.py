"""Memory of a real SuperNode: idle, and with a ClientApp that trains on images."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flwr_hetero.fleet import RealFleet, named_fleet
from flwr_hetero.fleet.throttle import children
from flwr_hetero_studies.core.apps import APPS
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.faults.fleet_run import FleetRun

IMAGES = (320, 80)
"""Rows that are kept: memory is that of the model and of one batch, not of the data."""
IDLE = ("SuperNode", "its executor", "SuperLink")


def plan(options: Options) -> Iterator[Trial]:
    for name in (*IDLE, "ClientApp, cnn, batch 16", "ClientApp, resnet18, batch 16"):
        yield Trial({"experiment": "memory", "name": name, "data": options.data}, alone=True)


def run(case: Case, data: Data) -> dict[str, float]:
    """Start a fleet with one SuperNode and measure one of its processes."""
    with tempfile.TemporaryDirectory() as name:
        fleet = RealFleet(Path(name) / "fleet")
        fleet.up(named_fleet("uniform", 1))
        try:
            if case["name"] in IDLE:
                return idle(fleet, case["name"])
            _, model, batch = case["name"].split(", ")
            run = Path(name) / "run"
            return training(fleet, data.first(*IMAGES), model, int(batch.split()[1]), run)
        finally:
            fleet.down()


def memory_mb(pid: int) -> dict[str, float]:
    """Return resident, private and peak resident memory of a process in MB; {} if it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = [line.split() for line in (rollup + status).splitlines() if line.endswith(" kB")]
    kb = {line[0].removesuffix(":"): int(line[1]) for line in lines}
    if "VmHWM" not in kb or "Rss" not in kb:
        return {}
    # shared libraries count once for all processes of a board
    private = kb["Private_Dirty"] + kb["Private_Clean"]
    figures = {"resident": kb["Rss"], "private": private, "peak": kb["VmHWM"]}
    return {name: round(value / 1024, 1) for name, value in figures.items()}


def idle(fleet: RealFleet, process: str) -> dict[str, float]:
    """Measure a process of a fleet that has nothing to do."""
    # until imports and handshakes are over
    time.sleep(10)
    supernode = fleet.file.nodes[0].pid
    (executor,) = children(supernode)
    return memory_mb(
        dict(zip(IDLE, (supernode, executor, fleet.file.superlink_pid), strict=True))[process]
    )


def training(fleet: RealFleet, dataset: str, model: str, batch: int, out: Path) -> dict[str, float]:
    """Run TiFL with one node, and keep the highest figures that its ClientApp processes show."""
    settings = {"dataset": dataset, "partition": "iid", "model": model, "fleet": "real"}
    sizes = {"num_server_rounds": 1, "clients_per_round": 1, "batch_size": batch}
    run = FleetRun(fleet, out, APPS / "tifl", **sizes, **settings).start()
    highest: dict[str, float] = {}
    while not run.is_over():
        for pid in run.client_app("node-0"):
            for name, value in memory_mb(pid).items():
                highest[name] = max(value, highest.get(name, 0.0))
        # a ClientApp lives for seconds: its peak is easily missed
        time.sleep(0.02)
    if run.round() != 1:
        raise RuntimeError(run.tail())
    return highest
