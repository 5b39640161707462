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
"""Rows of the data set that are kept, because only the model and one batch are to be measured."""
IDLE = ("SuperNode", "its executor", "SuperLink")
TRAINING = ("ClientApp, cnn, batch 16", "ClientApp, resnet18, batch 16")


def plan(options: Options) -> Iterator[Trial]:
    for name in (*IDLE, *TRAINING):
        yield Trial({"experiment": "memory", "name": name, "data": options.data}, alone=True)


def run(case: Case, data: Data) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        fleet = RealFleet(Path(folder) / "fleet")
        fleet.up(named_fleet("uniform", 1), warm=False)
        try:
            if case["name"] in IDLE:
                return idle(fleet, case["name"])
            return training(fleet, data.first(*IMAGES), case["name"], Path(folder) / "run")
        finally:
            fleet.down()


def memory_mb(pid: int) -> dict[str, float]:
    """Return resident, private and peak resident memory of a process in MB; {} if it is gone."""
    try:
        texts = [Path(f"/proc/{pid}/{name}").read_text() for name in ("smaps_rollup", "status")]
        lines = [line.split() for line in "".join(texts).splitlines() if line.endswith(" kB")]
        kb = {line[0].removesuffix(":"): int(line[1]) for line in lines}
        # Shared libraries count once for all processes of a board, so they are not private.
        private = kb["Private_Dirty"] + kb["Private_Clean"]
        figures = {"resident": kb["Rss"], "private": private, "peak": kb["VmHWM"]}
    # The process is about to end, or it is a zombie, which has no memory.
    except (OSError, KeyError):
        return {}
    return {name: round(value / 1024, 1) for name, value in figures.items()}


def idle(fleet: RealFleet, process: str) -> dict[str, float]:
    # Imports and handshakes are over after this time.
    time.sleep(10)
    supernode = fleet.file.nodes[0].pid
    pids = supernode, *children(supernode), fleet.file.superlink_pid
    return memory_mb(dict(zip(IDLE, pids, strict=True))[process])


def training(fleet: RealFleet, dataset: str, name: str, out: Path) -> dict[str, float]:
    """Run TiFL with one node, and return the highest figures of its ClientApp processes."""
    _, model, batch = name.split(", ")
    batch_size = int(batch.removeprefix("batch "))
    settings = {"dataset": dataset, "partition": "iid", "model": model, "fleet": "real"}
    settings |= {"num_server_rounds": 1, "clients_per_round": 1, "batch_size": batch_size}
    settings |= {"engine": "rounds", "selection": "tifl", "steps": "epochs"}
    run = FleetRun(fleet, out, APPS / "fleet", **settings).start()
    highest: dict[str, float] = {}
    while not run.is_over():
        for pid in run.client_app("node-0"):
            for figure, value in memory_mb(pid).items():
                highest[figure] = max(value, highest.get(figure, 0.0))
        # A ClientApp lives for seconds.
        time.sleep(0.02)
    if run.round() != 1:
        raise RuntimeError(run.tail())
    return highest
