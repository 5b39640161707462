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

ADACOMM = {"sampling": "uniform", "communication": "adacomm", "local-steps": 20}
METHODS: dict[str, Case] = {
    "uniform": {"sampling": "uniform"},
    "bacc": {"sampling": "bacc"},
    "free": {"sampling": "free"},
    "sequential": {"sampling": "sequential"},
    "all-inclusive": {"sampling": "all-inclusive"},
    "bacc, cycle": {"sampling": "bacc", "estimator": "cycle"},
    "bacc, paper": {"sampling": "bacc", "estimator": "paper"},
    "bacc, no gate": {"sampling": "bacc", "gate": 0.0},
    "bacc, gate shut": {"sampling": "bacc", "gate": 1e9},
    "bacc, mixing 0.2": {"sampling": "bacc", "mixing": 0.2},
    "adacomm": ADACOMM | {"adapt-every-s": 3.0},
    "uniform, resharding": {"sampling": "uniform", "resharding": "random"},
    "bacc, resharding": {"sampling": "bacc", "resharding": "importance"},
    "bacc, random resharding": {"sampling": "bacc", "resharding": "random"},
}
"""``bacc`` is the default of the app; AdaComm adapts about every ten rounds at 100 Mbit/s."""
KNOBS = ("bacc, no gate", "bacc, gate shut", "bacc, mixing 0.2", "bacc, cycle")
MBPS, ALPHAS, USUAL_MBPS = (10, 50, 100, 200), (10.0, 1.0, 0.5), 100


def case(name: str, alpha: float | None = None, mbps: int = USUAL_MBPS, nodes: int = 4) -> Case:
    """Describe a run by its method and its cell; keys are run-config or ``nodes``."""
    split = {"partition": "iid"} if alpha is None else {"partition": "dirichlet", "alpha": alpha}
    return {"method": name, "nodes": nodes, "fleet": f"wifi-{mbps}"} | split | METHODS[name]


def bandwidths() -> Iterator[Case]:
    """Vary the bandwidth (paper: Figures 11, 13, 15), data IID."""
    for mbps in MBPS:
        for name in ("uniform", "bacc"):
            yield case(name, mbps=mbps)


def alphas() -> Iterator[Case]:
    """Vary how unequal the data are (paper: Figure 18)."""
    for alpha in ALPHAS:
        for name in ("uniform", "bacc"):
            yield case(name, alpha)


def nodes() -> Iterator[Case]:
    """Spread the same data over more nodes (paper: Figure 17)."""
    for name in ("uniform", "bacc"):
        yield case(name, 1.0, nodes=12)


def rates() -> Iterator[Case]:
    """Vary the learning rate: uniform sampling is to be compared at its best."""
    for rate in (0.05, 0.1, 0.2, 0.4):
        for name in ("uniform", "bacc"):
            yield case(name) | {"learning-rate": rate}


def rivals() -> Iterator[Case]:
    """Run all methods in one cell."""
    for name in METHODS:
        if name not in KNOBS:
            yield case(name, 1.0)


def knobs() -> Iterator[Case]:
    """Turn the default's knobs in the same cell."""
    for name in KNOBS:
        yield case(name, 1.0)


def app() -> Iterator[Case]:
    """Run the app's default: for ``--dataset digits --model auto --batch-size 16``."""
    for name in ("uniform", "bacc"):
        yield case(name, 1.0, mbps=10)


def grid() -> Iterator[Case]:
    """Cross every bandwidth with every alpha."""
    for mbps in MBPS:
        for alpha in (None, *ALPHAS):
            for name in ("uniform", "bacc"):
                yield case(name, alpha, mbps)


EXPERIMENTS = {
    "bandwidths": bandwidths,
    "alphas": alphas,
    "nodes": nodes,
    "rates": rates,
    "rivals": rivals,
    "knobs": knobs,
    "app": app,
    "grid": grid,
}


def identity(line: Case) -> str:
    """Tell what a run was, whatever came out of it."""
    config = {key: value for key, value in line.items() if key not in RESULT}
    return json.dumps(config, sort_keys=True)


RESULT = ("rounds", "virtual_s", "accuracy", "open", "curve", "versions")


def run_case(described: Case, dataset: str) -> Case:
    """Run one case and return its line; ``dataset`` is where the data really are."""
    config = {k: v for k, v in described.items() if k not in ("method", "nodes", "data", "rows")}
    every = max(1, config["num-server-rounds"] // 60)
    return described | one_run(described["nodes"], every, dataset=dataset, **config)


def training(line: Case) -> str:
    """Tell what a run trains on: with uniform sampling the link changes nothing but the clock."""
    return identity(line | {"fleet": ""})


def timed_anew(line: Case, described: Case, dataset: str) -> Case:
    """Give a run of uniform sampling the clock of another link, as measured in two rounds."""
    times = run_case(described | {"num-server-rounds": 2}, dataset)["curve"]["virtual_s"]
    clock = [round(number * (times[2] - times[1]), 5) for number in line["curve"]["round"]]
    curve = line["curve"] | {"virtual_s": clock}
    return line | described | {"curve": curve, "virtual_s": clock[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--rows", type=int, default=12_000, help="training images in all")
    parser.add_argument("--test-rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    told = {"data": Path(options.dataset).name, "batch-size": options.batch_size}
    told["rows"] = 0 if options.dataset == "digits" else options.rows
    told["model"] = options.model
    told["learning-rate"] = options.learning_rate
    told["num-server-rounds"] = options.rounds
    wanted = {
        identity(one): one
        for seed in range(options.seeds)
        for name in options.experiments
        for one in (told | {"seed": seed} | described for described in EXPERIMENTS[name]())
        if one["method"] in options.methods
    }
    text = options.results.read_text() if options.results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    known = {training(line): line for line in done if line["method"] == "uniform"}
    todo = wanted.keys() - {identity(line) for line in done}
    dataset = subset(options.dataset, options.rows, options.test_rows)
    print(f"{len(todo)} of {len(wanted)} runs to do", flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        again, futures = [], []
        for described in (one for key, one in wanted.items() if key in todo):
            if described["method"] == "uniform" and training(described) in known:
                again.append(described)
                continue
            known |= {training(described): {}} if described["method"] == "uniform" else {}
            futures.append(pool.submit(run_case, described, dataset))
        for future in as_completed(futures):
            line = future.result()
            known |= {training(line): line} if line["method"] == "uniform" else {}
            keep(line, options.results)
        for described in again:
            keep(timed_anew(known[training(described)], described, dataset), options.results)


def keep(line: Case, results: Path) -> None:
    """Add a finished run to the results, and say so."""
    with results.open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)
    facts = [line.get(key, "iid") for key in ("seed", "nodes", "fleet", "alpha", "method")]
    print(*facts, f"{line['accuracy']:.4f} {line['virtual_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
