"""The paper's figures 6 to 10 on one node: training loss against iterations and time.

Usage: ``python benchmarks/pgd/run.py [--experiments fig6 ...] [--seeds 3] [--fashion FOLDER]``.
Adds a json line per run to ``results.jsonl``; runs that are there already are not repeated, so
it can be stopped and started. FOLDER holds Fashion-MNIST as ``train.parquet``.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from one_run import METHODS, one_run
from tasks import make_task

HERE = Path(os.environ.get("OUT") or Path(__file__).parent)
Case = dict[str, Any]
RATES = {
    "lr-synthetic": (0.01, 0.1, 1.0),
    "mlp-synthetic": (0.03, 0.1, 0.3),
    "mlp-fashion": (0.03, 0.1, 0.3),
    "cnn-fashion": (0.03, 0.1, 0.3),
}
"""Learning rates that every method tries on a task; the best of each is compared."""


def case(task: str, method: str, top: float, renewal: float, lr: float, **more: Any) -> Case:
    return {"task": task, "method": method, "top": top, "renewal": renewal, "lr": lr} | more


def fig6() -> Iterator[Case]:
    """Impact of the top ratio, with few and with many renewals."""
    for renewal in (0.001, 0.1):
        for top in (0.001, 0.01, 0.05, 0.1, 0.3):
            yield case("lr-synthetic", "PGD-A", top, renewal, 0.1)


def fig7() -> Iterator[Case]:
    """Impact of the renewal ratio, with a small and with a large top."""
    for top in (0.01, 0.1):
        for renewal in (0.001, 0.01, 0.05, 0.1, 0.3):
            yield case("lr-synthetic", "PGD-A", top, renewal, 0.1)


def fig8() -> Iterator[Case]:
    """Both together fixed at 2 %."""
    for task in ("lr-synthetic", "cnn-fashion"):
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            yield case(task, "PGD-A", 0.02 * (1 - share), 0.02 * share, 0.1)
        yield case(task, "SGD", 0.01, 0.01, 0.1)


def fig9() -> Iterator[Case]:
    """With and without the aggressive optimisation."""
    for renewal in (0.005, 0.01, 0.02):
        for method in ("PGD-A", "PGD-S"):
            yield case("cnn-fashion", method, 0.01, renewal, 0.03)


def fig10() -> Iterator[Case]:
    """Convergence against SGD at equal work, each method at its best learning rate."""
    for task, rates in RATES.items():
        for method in METHODS:
            for lr in rates:
                yield case(task, method, 0.01, 0.01, lr)


def late() -> Iterator[Case]:
    """Go on until the training loss is small: where few examples still have a gradient."""
    for method in METHODS:
        for lr in (0.1, 0.3):
            yield case("mlp-fashion", method, 0.005, 0.005, lr, samples=3000, length=10)


EXPERIMENTS = {f.__name__: f for f in (fig6, fig7, fig8, fig9, fig10, late)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--tasks", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--fashion", help="folder of Fashion-MNIST as Parquet")
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {identity(json.loads(line)) for line in lines}
    for seed in range(options.seeds):
        for experiment in options.experiments:
            for described in EXPERIMENTS[experiment]():
                if described["task"] not in options.tasks:
                    continue
                line = {
                    "experiment": experiment,
                    "samples": options.samples,
                    "iterations": options.iterations * described.pop("length", 1),
                    "seed": seed,
                } | described
                if identity(line) not in done:
                    add(options.results, line, options)


def identity(line: Case) -> tuple[Any, ...]:
    names = "experiment task method top renewal lr samples iterations seed"
    return tuple(line[name] for name in names.split())


def add(results: Path, line: Case, options: argparse.Namespace) -> None:
    """Run one case and write its line."""
    task = make_task(line["task"], line["samples"], options.fashion)
    keys = ("top", "renewal", "lr", "iterations", "seed")
    run = {key: line[key] for key in keys}
    try:
        curve = one_run(task, METHODS[line["method"]], points=options.points, **run)
    except ValueError as error:  # priorities that are not finite: the run has diverged
        line["stopped"], curve = str(error), []
    line |= {"torch": torch.__version__, "machine": platform.machine(), "curve": curve}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    last = curve[-1] if curve else {"loss": float("nan"), "seconds": float("nan")}
    told = " ".join(str(line[k]) for k in ("experiment", "task", "method", "top", "renewal", "lr"))
    print(f"{told}: loss {last['loss']:.4f}, {last['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
