"""Training with every order: softmax regression (convex) and LeNet on a Parquet data set.

Every case trains with the paper's synchronous steps (``parallel.py``) for each method and seed.
Usage, from the top folder:
``python -m benchmarks.cd_grab.run ../shared/data/fashion_mnist [--cases ...] [--seeds 0 1 2]``.
Appends a json line per run to ``training.jsonl`` and, for convex cases, the least value of the
objective to ``optimum.jsonl``; runs that are there already are passed over.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.cd_grab.parallel import Setup, optimum, run

HERE = Path(__file__).parent
SMALL: dict[str, object] = {"model": "lenet", "num_examples": 1024, "lr": 0.05, "l2": 0.0}
SMALL["epochs"] = 12
KEY = ("d-rr", "1024", "id-grab", "exact")
LEAST = ("d-rr", "1024", "id-grab")
CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "softmax, 8 nodes": ({}, (*KEY, "id-grab-mean", "shuffle-once", "256", "64")),
    "softmax, 64 nodes": ({"nodes": 64, "batch_size": 1}, (*KEY, "id-grab-mean")),
    "softmax, 4 nodes": ({"nodes": 4, "batch_size": 8}, KEY),
    "lenet, 8 nodes": (SMALL, LEAST),
    "lenet, 64 nodes": (SMALL | {"nodes": 64, "batch_size": 1}, LEAST),
    "lenet, 4 nodes": (SMALL | {"nodes": 4, "batch_size": 8}, LEAST),
    "softmax, 8 nodes, smaller step": ({"lr": 0.01}, KEY),
}


def setups(dataset: str, case: str, seed: int) -> list[Setup]:
    """List the runs of a case: methods by name, CD-GraB by its sketch size or ``exact``."""
    settings, methods = CASES[case]
    base = replace(Setup(dataset, seed=seed), **settings)  # type: ignore[arg-type]
    runs = []
    for method in methods:
        if method == "exact" or method.isdigit():
            size = 0 if method == "exact" else int(method)
            runs.append(replace(base, method="cd-grab", sketch_size=size))
        else:
            runs.append(replace(base, method=method))
    return runs


def append(path: Path, line: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    training, optima = options.out / "training.jsonl", options.out / "optimum.jsonl"
    known = ("model", "num_examples", "l2", "seed")
    for case in options.cases:
        for seed in options.seeds:
            for setup in setups(options.dataset, case, seed):
                name = {"case": case, "method": setup.method, "seed": seed}
                name["sketch_size"] = setup.sketch_size
                if any(name.items() <= line.items() for line in lines_of(training)):
                    continue
                start = time.perf_counter()
                line = run(setup)
                append(training, {"case": case, **line})
                print(case, seed, setup.method, setup.sketch_size, line["loss"][-1], flush=True)
                print(f"{time.perf_counter() - start:.1f} s", flush=True)
            objective = {key: asdict(setup)[key] for key in known}
            if setup.model == "softmax" and not any(
                objective.items() <= line.items() for line in lines_of(optima)
            ):
                append(optima, objective | {"value": optimum(setup)})


if __name__ == "__main__":
    main()
