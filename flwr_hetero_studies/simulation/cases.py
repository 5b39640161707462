"""Pairs of runs, one with each strategy, of all optimizers, partitions and numbers of workers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.plan import DIGITS, Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line

SETTINGS = {"rounds": 8, "nodes": 10, "train-examples": 10_000, "test-examples": 2_000}
FAST = {"rounds": 1, "nodes": 2, "train-examples": 200, "test-examples": 100}
FAST_CASES = ["momentum, IID, 2 workers"]
RATES = {"momentum": 0.03, "SGD": 0.3, "Adam": 0.003}
"""FedAvg's best of a grid of factors of about three, on the emulated fleet and another seed."""
PARTITIONS = {"IID": "iid", "Dirichlet(0.3)": "dirichlet"}
WORKERS = (2, 4)
NAMES = ("FedAvg", "FedSlice")
ALPHA = 0.3
LONGEST_S = 600


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    settings = dict(options.settings)
    for seed, workers in product(options.seeds_or(range(5)), WORKERS):
        for (optimizer, rate), (label, partition) in product(RATES.items(), PARTITIONS.items()):
            experiment = f"{optimizer}, {label}, {workers} workers"
            how = {"optimizer": optimizer, "partition": partition, "workers": workers}
            # The two of a pair run one after the other, in turns of who is first.
            for name in NAMES if seed % 2 else reversed(NAMES):
                case = {"experiment": experiment, "name": name, "data": options.data}
                yield Trial(case | how | {"rate": rate} | settings, seed, alone=True)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    dataset = data.first(case["train-examples"], case["test-examples"])
    # Digits, which show whether everything works, are too small for LeNet.
    model = "cnn" if dataset == DIGITS else "lenet"
    how = {"dataset": dataset, "model": model, "seed": seed, "alpha": ALPHA}
    text = json.dumps(case | how)
    app = Path(__file__).with_name("app.py")
    # Ray keeps much of a process for itself, so that each run has one of its own.
    done = subprocess.run(
        [sys.executable, str(app), text],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env=os.environ | {"RAY_DEDUP_LOGS": "0"},
    )
    if done.returncode:
        raise RuntimeError(f"the simulation failed:\n{done.stderr[-3000:]}")
    curve = json.loads(done.stdout.splitlines()[-1])
    load = round(os.getloadavg()[0], 2)
    return {"metrics": {"accuracy": curve["accuracy"][-1], "load": load}, "curve": curve}
