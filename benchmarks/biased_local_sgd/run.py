"""Biased local SGD against its baselines on emulated fleets, in virtual time.

Usage: ``python benchmarks/biased_local_sgd/run.py --dataset FOLDER [--experiments table1 ...]``.
Adds a json line per run to ``results.jsonl``; runs that are there already are not repeated, so
it can be stopped and started. FOLDER holds Fashion-MNIST (or another data set) as
``train.parquet`` and ``test.parquet``; ``digits`` needs no files and is for a quick look.
"""

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from one_run import fleet, mixed_fleet, one_run, subset

HERE = Path(os.environ.get("OUT") or Path(__file__).parent)
TAU_F, SLOW_STEPS = 32, (16, 4, 1)
FLEETS = {"2+8": (8, 2), "1+1": (1, 1)}
"""The paper's settings: slow + fast nodes, here as (fast, slow)."""
BATCH = {"2+8": {"batch-size": 32}, "1+1": {"batch-size": 128, "learning-rate": 0.2}}
SHARED = {"shared-data": True}
ALL_BIASES = ("unbalanced", "sampling-bias", "weights-bias", "biased")

Case = dict[str, Any]


def case(label: str, algorithm: str, nodes: str = "2+8", slow: int = 1, **more: Any) -> Case:
    """Describe a run; ``epochs`` and ``num_fast``, ``num_slow`` are ours, the rest run-config."""
    num_fast, num_slow = FLEETS[nodes]
    described = {"label": label, "algorithm": algorithm, "fleet": nodes, "slow_steps": slow}
    return described | {"num_fast": num_fast, "num_slow": num_slow} | BATCH[nodes] | more


def table1() -> Iterator[Case]:
    """Equal epochs, gamma = 1/32: synchronous and balanced against biased; extra epochs."""
    yield case("synchronous SGD", "sync-sgd", **SHARED)
    yield case("synchronous SGD, 8 fast only", "sync-sgd", num_slow=0, **SHARED)
    yield case("balanced local SGD", "balanced", **SHARED)
    for times in (1, 2, 3):
        yield case(f"biased local SGD, {times}x epochs", "biased", times=times, **SHARED)


def table2() -> Iterator[Case]:
    """Do the slow nodes help? Fast ones alone for the same time, by the share of the work."""
    work = 8 * TAU_F / (8 * TAU_F + 2)
    yield case("8 fast only", "balanced", num_slow=0, times=work, **SHARED)
    yield case("2+8, biased", "biased", **SHARED)


def tables3_and_7() -> Iterator[Case]:
    """Biased against unbiased and each bias alone (Figure 4), at equal virtual time."""
    for nodes in FLEETS:
        for slow in SLOW_STEPS:
            for name in ALL_BIASES:
                yield case(name, name, nodes, slow, **SHARED)


def table6() -> Iterator[Case]:
    """Separate against unified sampling; both biases on."""
    for name, unified in (("separate", False), ("unified", True)):
        yield case(name, "biased", unified=unified, **SHARED)


def knobs() -> Iterator[Case]:
    """Lambda, and allocations smaller than the paper's N_F, which strengthen the bias."""
    for fraction in (0.1, 0.3, 0.5, 0.8, 1.0):
        more = {"high-loss-fraction": fraction}
        yield case(f"lambda {fraction}", "biased", nodes="1+1", slow=16, **SHARED, **more)
    for share in (0.9, 0.7, 0.5, 0.3):
        yield case(f"share {share}", "biased", share=share, **SHARED)


def federated() -> Iterator[Case]:
    """Weight by steps or as FedNova, on private data, equal and unequal."""
    for partition in ("iid", "dirichlet"):
        for name in (*ALL_BIASES, "fednova"):
            yield case(f"{name}, {partition}", name, slow=4, partition=partition, alpha=0.3)


def links() -> Iterator[Case]:
    """Compare budgets on ten different devices, half of them with slow links, at equal time."""
    for label, algorithm, budget in (
        ("balanced", "balanced", "two-class"),
        ("biased, two classes", "biased", "two-class"),
        ("biased, deadline", "biased", "deadline"),
    ):
        more = {"fleet": "mixed", "model": "cnn"}
        yield case(label, algorithm, budget_s=30.0, budget=budget) | more


EXPERIMENTS = {
    "table1": table1,
    "table2": table2,
    "tables3+7": tables3_and_7,
    "table6": table6,
    "knobs": knobs,
    "federated": federated,
    "links": links,
}


TOLD = ("dataset", "samples", "base_epochs", "model", "experiment", "label", "fleet", "slow_steps",
        "seed")  # fmt: skip
"""What names a line of the results."""


def identity(line: Case) -> tuple[Any, ...]:
    return tuple(line[key] for key in TOLD)


def run_case(described: Case, dataset: str) -> Case:
    """Run one case and return its line; ``dataset`` is where the data really are."""
    config = {key: value for key, value in described.items() if key not in TOLD}
    num_fast, num_slow = config.pop("num_fast"), config.pop("num_slow")
    times, budget_s = config.pop("times", 1.0), config.pop("budget_s", None)
    epochs, slow = times * described["base_epochs"], described["slow_steps"]
    mixed = described["fleet"] == "mixed"
    nodes = mixed_fleet(TAU_F) if mixed else fleet(num_fast, num_slow, TAU_F, slow)
    limit = {"epochs": epochs} if budget_s is None else {"budget_s": budget_s}
    config |= {"fast-steps": TAU_F, "dataset": dataset}
    config |= {key: described[key] for key in ("model", "seed")}
    result = one_run(nodes, described["samples"], **limit, **config)
    return {key: described[key] for key in TOLD} | {"times": times} | result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    name = Path(options.dataset).name
    dataset, samples = options.dataset, 1438
    if dataset != "digits":
        dataset, samples = subset(options.dataset, options.samples), options.samples
    told = {"dataset": name, "samples": samples, "base_epochs": options.epochs}
    told["model"] = options.model
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {identity(json.loads(line)) for line in lines}
    cases = [
        told | {"experiment": experiment, "seed": seed} | described
        for seed in range(options.seeds)
        for experiment in options.experiments
        for described in EXPERIMENTS[experiment]()
    ]
    todo = [one for one in cases if identity(one) not in done]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(run_case, one, dataset) for one in todo]
        for future in as_completed(waiting):
            line = future.result()
            with options.results.open("a", encoding="utf-8") as results:
                print(json.dumps(line), file=results)
            facts = [line[key] for key in ("seed", "experiment", "label", "fleet", "slow_steps")]
            print(*facts, f"{line['accuracy']:.4f} {line['virtual_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
