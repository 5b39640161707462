"""Memory of a real SuperNode: idle, and with a ClientApp that trains on 28 x 28 images.

Usage: ``python benchmarks/memory/run.py DATASET [--models cnn resnet18] [--batch 16]``; DATASET is
a Parquet folder of 28 x 28 images such as Fashion-MNIST. Writes ``results.jsonl`` beside this file.
"private" is what the process alone has, "resident" counts shared libraries too.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.faults.experiment import Experiment
from flwr_hetero.fleet import RealFleet, named_fleet
from flwr_hetero.fleet.throttle import children

HERE = Path(__file__).parent
TIFL = HERE.parents[1] / "apps" / "tifl"
IMAGES = {"train": 320, "test": 80}
"""Rows of each split that are kept: memory is that of the model and of one batch, not of data."""


def memory_mb(pid: int) -> dict[str, float]:
    """Return resident, private and peak resident memory of a process in MB; {} if it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    kb = {
        line.split(":")[0]: int(line.split()[1])
        for line in (rollup + status).splitlines()
        if line.endswith(" kB")
    }
    if "VmHWM" not in kb or "Rss" not in kb:
        return {}
    private = kb["Private_Dirty"] + kb["Private_Clean"]
    figures = {"resident": kb["Rss"], "private": private, "peak": kb["VmHWM"]}
    return {name: round(value / 1024, 1) for name, value in figures.items()}


def cut(dataset: Path, folder: Path) -> Path:
    """Write the first rows of each split into a folder."""
    folder.mkdir()
    for split, rows in IMAGES.items():
        pq.write_table(
            pq.read_table(dataset / f"{split}.parquet").slice(0, rows), folder / f"{split}.parquet"
        )
    return folder


def idle(fleet: RealFleet) -> dict[str, dict[str, float]]:
    """Measure the processes of a fleet that has nothing to do."""
    time.sleep(10)
    supernode = fleet.file.nodes[0].pid
    (executor,) = children(supernode)
    pids = {
        "SuperNode": supernode,
        "its executor": executor,
        "SuperLink": fleet.file.superlink_pid,
    }
    return {name: memory_mb(pid) for name, pid in pids.items()}


def training(fleet: RealFleet, dataset: Path, model: str, batch: int, out: Path) -> dict:
    """Run TiFL with one node, and keep the highest figures that its ClientApp processes show."""
    settings = {"dataset": str(dataset), "partition": "iid", "model": model, "fleet": "real"}
    run = Experiment(
        fleet, out, TIFL, num_server_rounds=1, clients_per_round=1, batch_size=batch, **settings
    ).start()
    highest: dict[str, float] = {}
    while not run.is_over():
        for pid in run.client_app("node-0"):
            for name, value in memory_mb(pid).items():
                highest[name] = max(value, highest.get(name, 0.0))
        time.sleep(0.02)
    if run.round() != 1:
        sys.exit(run.tail())
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18"])
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    about = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": version("torch"),
        "flwr": version("flwr"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = cut(options.dataset, folder / "data")
        fleet = RealFleet(folder / "fleet")
        fleet.up(named_fleet("uniform", 1))
        try:
            lines = [{"what": what, **figures} for what, figures in idle(fleet).items()]
            for model in options.models:
                figures = training(fleet, dataset, model, options.batch, folder / model)
                what = f"ClientApp, {model}, batch {options.batch}"
                lines.append({"what": what, **figures})
        finally:
            fleet.down()
    text = "".join(json.dumps(line | about) + "\n" for line in lines)
    (HERE / "results.jsonl").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
