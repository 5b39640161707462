"""One fleet, one data set: Flower's strategies, each system alone, all five, and all but one.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), Dirichlet(0.5) labels, 3 nodes a round,
small CNN. FedNova and biased local SGD give each node the steps that it can take while the
quickest takes 20. FedAvg trains for a fixed number of rounds; every other setting ends when it has
used as much virtual time or ``--most`` times the rounds, whichever comes first. Profiling counts.
Usage: ``python benchmarks/headline/run.py DATASET`` with a Parquet folder such as Fashion-MNIST
or CIFAR-10 (``train.parquet``, ``test.parquet``), or ``digits``; writes ``DATASET.jsonl`` beside
this file, a json line per setting and seed; ``report.py`` makes the page from all of them.
"""

import argparse
import json
import logging
import os
import random
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq
import torch

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "fleet"))
from fleet_app.client_app import app
from fleet_app.task import FleetSettings

HERE = Path(__file__).parent
NODES = 20
PLAIN = {
    "selection": "random",
    "steps": "epochs",
    "aggregation": "examples",
    "order": "reshuffle",
    "sampler": "uniform",
}
STEPS = {"steps": "deadline", "aggregation": "steps"}
ALL = {
    **STEPS,
    "selection": "tifl",
    "order": "cd-grab",
    "sampler": "top-loss+mercury+pgd",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": PLAIN,
    "FedProx": {**PLAIN, "inner": "fedprox"},
    "FedNova": {**PLAIN, "steps": "deadline", "aggregation": "fednova"},
    "TiFL": {**PLAIN, "selection": "tifl"},
    "biased local SGD": {**PLAIN, **STEPS, "sampler": "top-loss"},
    "CD-GraB": {**PLAIN, "order": "cd-grab"},
    "Mercury": {**PLAIN, "sampler": "mercury"},
    "PGD": {**PLAIN, "sampler": "pgd"},
    "all five": ALL,
    "all but TiFL": {**ALL, "selection": "random"},
    "all but biased local SGD": {
        **ALL,
        "steps": "epochs",
        "aggregation": "examples",
        "sampler": "mercury+pgd",
    },
    "all but CD-GraB": {**ALL, "order": "reshuffle"},
    "all but Mercury": {**ALL, "sampler": "top-loss+pgd"},
    "all but PGD": {**ALL, "sampler": "top-loss+mercury"},
}


class Enough(Exception):
    """Ends a run before its last round."""


class Curve(Wrapper):
    """Note accuracy, time, traffic and device-seconds after each round."""

    def __init__(self, strategy: Wrapper, budget_s: float) -> None:
        super().__init__(strategy)
        self.budget_s, self.points = budget_s, []
        self.total = {"bytes": 0, "device_s": 0.0}

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Add a point; end the run when the time is up."""
        self.total["bytes"] += record["bytes_down"] + record["bytes_up"]
        self.total["device_s"] += sum(record["latency"].values())
        point = {"virtual_s": record["virtual_s"], "accuracy": record["global"]["accuracy"]}
        self.points.append({**point, **self.total})
        if record["virtual_s"] > self.budget_s:
            raise Enough


def one_run(
    name: str, run_config: dict[str, Any], budget_s: float = float("inf")
) -> dict[str, Any]:
    """Train once and return the curve."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = FleetSettings.from_run_config(run_config)
    random.seed(settings.seed)
    grid = LocalGrid(
        app, named_fleet(settings.fleet, NODES), seed=settings.seed, run_config=run_config
    )
    curve = Curve(settings.strategy(NODES), budget_s)
    evaluate_fn = central_evaluate(settings)
    start = time.perf_counter()
    with suppress(Enough):
        curve.start(
            grid, initial_arrays(settings), settings.num_server_rounds, evaluate_fn=evaluate_fn
        )
    columns = {key: [round(p[key], 4) for p in curve.points] for key in curve.points[0]}
    took_s = round(time.perf_counter() - start, 1)
    return {"setting": name, "seed": settings.seed, "took_s": took_s, **columns}


def job(task: tuple[str, int, float], shared: dict[str, Any], most: int) -> dict[str, Any]:
    """Run a setting with a seed; all but FedAvg may take more rounds, in FedAvg's time."""
    name, seed, budget_s = task
    rounds = shared["num-server-rounds"] * (1 if name == "FedAvg" else most)
    config = {**shared, **SETTINGS[name], "seed": seed, "num-server-rounds": rounds}
    return one_run(name, config, budget_s)


def first_rows(dataset: str, rows: int, folder: str) -> str:
    """Write the first rows of a Parquet data set to a folder; ``digits`` stays as it is."""
    if dataset == "digits":
        return dataset
    for split, count in (("train", rows), ("test", rows // 3)):
        table = pq.read_table(Path(dataset).expanduser() / f"{split}.parquet")
        pq.write_table(table.slice(0, count), Path(folder) / f"{split}.parquet")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--train-examples", type=int, default=6_000)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="DATASET.jsonl beside this file if left out")
    options = parser.parse_args()
    out = options.out or HERE / f"{Path(options.dataset).name}.jsonl"
    names = [name for name in options.settings if name != "FedAvg"]
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "dataset": first_rows(options.dataset, options.train_examples, folder),
            "num-server-rounds": options.rounds,
            "learning-rate": options.learning_rate,
            "fast-steps": 20,
        }
        work = partial(job, shared=shared, most=options.most)
        facts = {
            "dataset": Path(options.dataset).name,
            "train_examples": options.train_examples,
            "learning_rate": options.learning_rate,
            "most": options.most,
            "command": shlex.join(["python", "benchmarks/headline/run.py", *sys.argv[1:]]),
            "versions": {name: version(name) for name in ("flwr", "torch", "numpy")},
        }
        with (
            ProcessPoolExecutor(options.jobs) as pool,
            out.open("w", encoding="utf-8") as results,
        ):
            limits: dict[int, float] = {}
            first = [("FedAvg", seed, float("inf")) for seed in options.seeds]
            for line in pool.map(work, first):
                limits[line["seed"]] = line["virtual_s"][-1]
                write(line, facts, results)
            rest = [(name, seed, limits[seed]) for name in names for seed in options.seeds]
            for line in pool.map(work, rest):
                write(line, facts, results)


def write(line: dict[str, Any], facts: dict[str, Any], results: TextIO) -> None:
    """Append a run to the results and say how it ended."""
    print(json.dumps({**facts, **line}), file=results, flush=True)
    print(f"{line['setting']}, seed {line['seed']}: {line['accuracy'][-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
