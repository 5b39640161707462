"""What a step of each method costs beside a step of SGD, timed in turn in one process.

Usage: ``python benchmarks/pgd/prices.py --fashion FOLDER``. Writes ``prices.jsonl``, a line per
task and method. All methods train side by side, some steps each in turn, so that whatever else
the machine does falls on all of them alike, for as many steps and at the learning rate that SGD
has in ``results.jsonl``. The price of a method is its CPU time over SGD's in the same turn, after
the first epoch: the median in each quarter of the run, for the default's gate may open on the
way, and the mean of the quarters.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from curves import best_rate
from one_run import METHODS, make_steps
from run import FINISHERS, PAPERS, SAMPLES, read
from tasks import Task, make_task

HERE = Path(__file__).parent
Times = dict[str, list[float]]
SETTINGS = (*(("fig10", name, 0.01) for name in SAMPLES), ("late", "mlp-fashion", 0.005))
"""Experiment, task, and k = r."""
STEPS = 30
"""Of each method in a turn."""


def race(task: Task, methods: Sequence[str], ratio: float, lr: float, turns: int) -> Times:
    """Train all methods in turn; seconds to get ready, then of each turn."""
    racers, seconds = {}, {}
    for name in methods:
        start_of(task, name, ratio, lr)  # loads kernels and rules
        racers[name], ready = start_of(task, name, ratio, lr)
        seconds[name] = [ready]
    for _ in range(turns):
        for name, racer in racers.items():
            start = time.process_time()
            for _ in range(STEPS):
                next(racer)
            seconds[name].append(time.process_time() - start)
    return seconds


def start_of(task: Task, method: str, ratio: float, lr: float) -> tuple[Iterator[None], float]:
    """Get ready for the first step; tell how long it took."""
    model = task.make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    steps = make_steps(task, model, optimizer, METHODS[method], ratio, ratio, 0)
    start = time.process_time()
    next(steps)
    return steps, time.process_time() - start


def prices(
    experiment: str, name: str, ratio: float, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Measure one task."""
    task = make_task(name, SAMPLES[name], options.fashion)
    known = {"fig10": (*PAPERS, "PGD-A, last layer"), "late": FINISHERS}
    methods = [m for m in known[experiment] if m in {"SGD", *(options.methods or METHODS)}]
    if methods == ["SGD"]:
        return
    sgd = [r for r in read(HERE / "results.jsonl") if r["method"] == "SGD"]
    sgd = [r for r in sgd if (r["experiment"], r["task"]) == (experiment, name)]
    turns = min(options.turns, sgd[0]["iterations"] // STEPS)
    seconds = race(task, methods, ratio, best_rate(sgd) or 0.1, turns)
    epoch = -(-round(0.5 / ratio) // STEPS)  # taken in turn, but for the full first pass
    base = np.array(seconds["SGD"][1:])
    for method, (ready, *times) in seconds.items():
        ratios = (np.array(times) / base)[epoch:]
        quarters = [float(np.median(part)) for part in np.array_split(ratios, 4)]
        yield {
            "experiment": experiment,
            "task": name,
            "method": method,
            "ms": 1e3 * float(np.median(times)) / STEPS,
            "price": float(np.mean(quarters)),
            "quarters": quarters,
            "price_low": float(np.quantile(ratios, 0.1)),
            "price_high": float(np.quantile(ratios, 0.9)),
            "start": ready / float(np.median(base)) * STEPS if METHODS[method].full_pass else 0.0,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", required=True, help="folder of Fashion-MNIST as Parquet")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="beside SGD; else all")
    parser.add_argument("--turns", type=int, default=80, help="at most; no longer than SGD runs")
    parser.add_argument("--experiments", nargs="+", default=["fig10", "late"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = HERE / "prices.jsonl"
    text = results.read_text() if results.exists() else ""
    lines = {key_of(line): line for line in map(json.loads, text.splitlines())}
    for setting in SETTINGS:
        if setting[0] not in options.experiments:
            continue
        for line in prices(*setting, options):
            lines[key_of(line)] = line
            print(f"{line['task']:14} {line['method']:24} {line['price']:.2f}x", flush=True)
            text = "".join(json.dumps(one) + "\n" for one in lines.values())
            results.write_text(text, encoding="utf-8")


def key_of(line: dict[str, object]) -> tuple[object, ...]:
    return line["experiment"], line["task"], line["method"]


if __name__ == "__main__":
    main()
