"""Which runs are made in real seconds: all methods on waiting nodes, and on throttled ones."""

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core import record
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.real import waiting
from flwr_hetero_studies.real.race import BASE, LATE, WORKLOADS, race

SETTINGS = {name: workload.rounds for name, workload in WORKLOADS.items()}
SETTINGS |= {waiting.WAITING: waiting.ROUNDS}
"""Rounds of FedAvg."""
FAST = {"light": 2, waiting.WAITING: 2}
FAST_CASES = ["light/FedAvg", "light/FedSlice"]
SEEDS = 3
ORDER = (
    ("light", BASE), ("light", "FedSlice"), ("light", "TiFL"),
    ("heavy", BASE), ("heavy", "FedSlice"),
)  # fmt: skip


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    seeds = options.seeds_or(range(SEEDS))
    shared = {"name": "all", "data": options.data, "rounds": options.settings[waiting.WAITING]}
    case = {"experiment": waiting.WAITING, **shared}
    waited = record.by_seed(record.of(lines, **case))
    for seed in seeds:
        yield Trial(case, seed, alone=True)
        if seed in waited:
            given = {"message_s": waited[seed]["metrics"]["message_s"]}
            yield Trial({"experiment": waiting.EMULATED, **shared}, seed, given)
    for seed, (workload, name) in product(seeds, ORDER):
        case = {"experiment": workload, "name": name, "data": options.data}
        case |= {"rounds": options.settings[workload]}
        base = record.by_seed(record.of(lines, **case | {"name": BASE})).get(seed)
        if name == BASE:
            yield Trial(case, seed, alone=True)
        elif base is not None:
            budget_s = LATE * base["curve"]["seconds"][-1]
            given = {"target": base["metrics"]["target"], "budget_s": round(budget_s, 1)}
            yield Trial(case, seed, given, alone=True)


def run(case: Case, seed: int, data: Data, **given: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case["experiment"] == waiting.WAITING:
            return waiting.run(data, seed, case["rounds"], folder)
        if case["experiment"] == waiting.EMULATED:
            return waiting.run_emulated(data, seed, case["rounds"], given["message_s"], folder)
        return race(case, seed, data, folder, **given)
