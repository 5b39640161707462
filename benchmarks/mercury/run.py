"""Mercury against uniform sampling and its other rivals on emulated fleets, in virtual time.

Usage: ``OMP_NUM_THREADS=1 python benchmarks/mercury/run.py --dataset FOLDER [--experiments ...]``.
Adds a json line per run to ``results.jsonl``; runs that are there already are not repeated, so it
can be stopped and started. FOLDER holds Fashion-MNIST (or another data set) as ``train.parquet``
and ``test.parquet``; ``digits`` needs no files and is for a quick look.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from one_run import one_run, subset

HERE = Path(__file__).parent
Case = dict[str, Any]

METHODS: dict[str, Case] = {
    "uniform": {"sampling": "uniform"},
    "free": {"sampling": "free"},
    "bacc": {"sampling": "bacc"},
    "bacc, no gate": {"sampling": "bacc", "gate": 0.0},
    "bacc, mixing 0.2": {"sampling": "bacc", "mixing": 0.2},
    "sequential": {"sampling": "sequential"},
    "all-inclusive": {"sampling": "all-inclusive"},
    "bacc, cycle": {"sampling": "bacc", "estimator": "cycle"},
    "bacc, paper": {"sampling": "bacc", "estimator": "paper"},
    "adacomm": {"sampling": "uniform", "communication": "adacomm", "local-steps": 20},
}
MAIN = ("uniform", "free", "bacc", "bacc, paper", "adacomm")


def case(name: str, **more: Any) -> Case:
    """Describe a run by a method and what else differs; keys are run-config or ``nodes``."""
    return {"method": name, "nodes": 4, "partition": "iid"} | METHODS[name] | more


def bandwidths() -> Iterator[Case]:
    """Vary the bandwidth for every method (paper: Figures 11, 13, 15), data IID on 4 nodes."""
    for mbps in (10, 50, 200):
        for name in METHODS:
            yield case(name, fleet=f"wifi-{mbps}")


def alphas() -> Iterator[Case]:
    """Vary how unequal the data are (paper: Figure 18), on 12 nodes."""
    for alpha in (10.0, 1.0, 0.5):
        for name in MAIN:
            yield case(name, nodes=12, partition="dirichlet", alpha=alpha, fleet="wifi-10")


def nodes() -> Iterator[Case]:
    """Vary the number of nodes (paper: Figure 17)."""
    for count in (4, 8, 12):
        for name in MAIN:
            yield case(name, nodes=count, fleet="wifi-50")


def rates() -> Iterator[Case]:
    """Vary the learning rate: each method is to be compared at its best."""
    for rate in (0.05, 0.1, 0.2, 0.4):
        for name in ("uniform", "free", "bacc"):
            yield case(name, fleet="wifi-50") | {"learning-rate": rate}


def one_step() -> Iterator[Case]:
    """Communicate after every step, as the paper does."""
    for name in MAIN[:-1]:
        yield case(name, fleet="wifi-10") | {"local-steps": 1}


def knobs() -> Iterator[Case]:
    """Vary the share of uniform draws and the gate."""
    for mixing in (0.1, 0.25, 0.5, 0.75):
        for gate in (0.0, 1.2, 1.5, 2.0):
            yield case("bacc", fleet="wifi-50", mixing=mixing, gate=gate)


def resharding() -> Iterator[Case]:
    """Reshard by importance, at random and not at all, on very unequal data."""
    for name in ("uniform", "bacc"):
        for kind in ("off", "importance", "random"):
            yield case(name, partition="dirichlet", alpha=0.1, fleet="wifi-50", resharding=kind)


EXPERIMENTS = {
    "bandwidths": bandwidths,
    "alphas": alphas,
    "nodes": nodes,
    "rates": rates,
    "one step": one_step,
    "knobs": knobs,
    "resharding": resharding,
}
ROUNDS = {"one step": 4}
"""Experiments that need a multiple of the usual rounds."""


def identity(line: Case) -> str:
    """Tell what a run was, whatever came out of it."""
    config = {key: value for key, value in line.items() if key not in RESULT}
    return json.dumps(config, sort_keys=True)


RESULT = ("rounds", "virtual_s", "accuracy", "open", "curve")


def run_case(described: Case, dataset: str) -> Case:
    """Run one case and return its line; ``dataset`` is where the data really are."""
    told = ("experiment", "method", "nodes", "data", "rows")
    config = {key: value for key, value in described.items() if key not in told}
    every = max(1, config["num-server-rounds"] // 40)
    return described | one_run(described["nodes"], every, dataset=dataset, **config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--rows", type=int, default=6000, help="training images in all")
    parser.add_argument("--test-rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    told = {"data": Path(options.dataset).name, "batch-size": options.batch_size}
    told["rows"] = 0 if options.dataset == "digits" else options.rows
    told["learning-rate"] = options.learning_rate
    cases = [
        told
        | {"experiment": name, "seed": seed}
        | {"num-server-rounds": options.rounds * ROUNDS.get(name, 1)}
        | described
        for seed in range(options.seeds)
        for name in options.experiments
        for described in EXPERIMENTS[name]()
        if described["method"] in options.methods
    ]
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {identity(json.loads(line)) for line in lines}
    todo = [one for one in cases if identity(one) not in done]
    dataset = subset(options.dataset, options.rows, options.test_rows)
    print(f"{len(todo)} of {len(cases)} runs to do", flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_case, one, dataset) for one in todo]):
            line = future.result()
            with options.results.open("a", encoding="utf-8") as results:
                print(json.dumps(line), file=results)
            facts = [line[key] for key in ("seed", "experiment", "method", "fleet")]
            print(*facts, f"{line['accuracy']:.4f} {line['virtual_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
