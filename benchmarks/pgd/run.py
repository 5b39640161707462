"""The paper's figures 6 to 10 on one node: training loss against iterations and time.

Usage: ``python benchmarks/pgd/run.py --fashion FOLDER [--experiments fig6 ...] [--seeds 3]``.
Adds a json line per run to ``results.jsonl``; runs that are there already are not repeated, so
it can be stopped and started. FOLDER holds Fashion-MNIST as ``train.parquet``. All of it takes
about half an hour on one core.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from curves import best_rate, is_unbiased
from one_run import METHODS, one_run
from tasks import make_task

HERE = Path(__file__).parent
Case = dict[str, Any]
RATES = {
    "lr-synthetic": (0.1, 1.0),
    "mlp-synthetic": (0.1, 0.3),
    "mlp-fashion": (0.03, 0.1, 0.3),
    "cnn-fashion": (0.03, 0.1, 0.3),
}
"""Learning rates that SGD and the biased methods try on a task with the first seed; with the
others each keeps to its best. The unbiased rules run at SGD's."""
SAMPLES = {
    "lr-synthetic": 10_000,
    "mlp-synthetic": 3000,
    "mlp-fashion": 3000,
    "cnn-fashion": 2000,
}
"""Training examples; the paper has 10,000 synthetic ones."""
POINTS = {"cnn-fashion": 15}
"""Evaluations per run, 30 where not named."""
PAPERS = ("SGD", "PGD-A", "PGD-A, full first pass", "PGD-S", "normalised", "stochastic",
          "stochastic, no gate")  # fmt: skip
FINISHERS = ("SGD", "PGD-A", "PGD-A, full first pass", "stochastic", "stochastic, no gate")


def case(
    task: str,
    method: str,
    top: float,
    renewal: float,
    lr: float,
    *,
    iterations: int = 300,
) -> Case:
    return {
        "task": task,
        "samples": SAMPLES[task],
        "iterations": iterations,
        "method": method,
        "top": top,
        "renewal": renewal,
        "lr": lr,
    }


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
    for renewal in (0.005, 0.02):
        for method in ("PGD-A", "PGD-S"):
            yield case("cnn-fashion", method, 0.01, renewal, 0.03)


def fig10() -> Iterator[Case]:
    """Convergence against SGD at equal work, each method at its best learning rate."""
    for task, rates in RATES.items():
        length = 600 if task.startswith("mlp") else 300
        for method in (*PAPERS, "PGD-A, last layer") if task.startswith("mlp") else PAPERS:
            for lr in rates:
                yield case(task, method, 0.01, 0.01, lr, iterations=length)


def late() -> Iterator[Case]:
    """Go on until the training loss is small: where few examples still have a gradient."""
    for method in FINISHERS:
        for lr in (0.1, 0.3):
            yield case("mlp-fashion", method, 0.005, 0.005, lr, iterations=2400)


EXPERIMENTS = {f.__name__: f for f in (fig10, late, fig8, fig9, fig6, fig7)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--tasks", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--fashion", help="folder of Fashion-MNIST as Parquet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for experiment in options.experiments:
            done = read(options.results)
            for described in EXPERIMENTS[experiment]():
                line = {"experiment": experiment, "seed": seed} | described
                if line["task"] in options.tasks and is_wanted(line, done):
                    done.append(add(options.results, line, options.fashion))


def read(results: Path) -> list[Case]:
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def is_wanted(line: Case, done: list[Case]) -> bool:
    """Whether a run is missing, and not at a rate that lost with the first seed."""
    same = ("experiment", "task", "top", "renewal", "samples", "iterations")
    others = [other for other in done if all(line[name] == other[name] for name in same)]
    own = [other for other in others if other["method"] == line["method"]]
    if any((line["lr"], line["seed"]) == (other["lr"], other["seed"]) for other in own):
        return False
    if is_unbiased(line["method"]):
        own = [other for other in others if other["method"] == "SGD"]
    elif line["seed"] == 0:
        return True
    return line["lr"] == best_rate(own)


def add(results: Path, line: Case, fashion: str | None) -> Case:
    """Run one case and write its line."""
    task = make_task(line["task"], line["samples"], fashion)
    run = {key: line[key] for key in ("top", "renewal", "lr", "iterations", "seed")}
    points = POINTS.get(line["task"], 30)
    try:
        curve = one_run(task, METHODS[line["method"]], points=points, **run)
    except ValueError as error:  # priorities that are not finite: the run has diverged
        line["stopped"], curve = str(error), []
    line |= {"torch": torch.__version__, "machine": platform.machine(), "curve": rounded(curve)}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    last = curve[-1] if curve else {"loss": float("nan"), "seconds": float("nan")}
    told = " ".join(str(line[k]) for k in ("experiment", "task", "method", "top", "renewal", "lr"))
    print(f"{told}: loss {last['loss']:.4f}, {last['seconds']:.1f} s", flush=True)
    return line


def rounded(curve: list[dict[str, float]]) -> list[dict[str, float]]:
    """Keep five significant digits: the file is committed."""
    return [{name: float(f"{value:.5g}") for name, value in point.items()} for point in curve]


if __name__ == "__main__":
    main()
