"""Which runs are made in real seconds, in order of importance, and predicted by emulation."""

import tempfile
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from flwr_hetero_studies.core import record
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.real import waiting
from flwr_hetero_studies.real.foretell import foretell
from flwr_hetero_studies.real.race import race
from flwr_hetero_studies.real.workloads import BASE, WORKLOADS, fleet

SETTINGS = {"light": WORKLOADS["light"].rounds, "heavy": WORKLOADS["heavy"].rounds}
SETTINGS |= {"light-cold": 10, "late": 1.2, waiting.WAITING: waiting.ROUNDS}
"""Rounds of FedAvg. Others end after ``late`` times its seconds."""
FAST = {"light": 2, "light-cold": 2, waiting.WAITING: 2}
FAST_CASES = ["light-*/FedAvg", "light-*/FedSlice"]
SEEDS = 3


class Entry(NamedTuple):
    """A run on Flower's own nodes (cold) or on warm ones."""

    workload: str
    node: str
    name: str

    @property
    def experiment(self) -> str:
        return f"{self.workload}-{self.node}"


ORDER = (
    Entry("light", "warm", BASE), Entry("light", "warm", "FedSlice"),
    Entry("light", "cold", BASE), Entry("light", "cold", "FedSlice"),
    Entry("heavy", "warm", BASE), Entry("heavy", "warm", "FedSlice"),
    Entry("heavy", "warm", "FedBuff"), Entry("light", "warm", "FedBuff"),
    Entry("light", "warm", "TiFL"), Entry("heavy", "warm", "TiFL"),
    Entry("heavy", "cold", BASE), Entry("heavy", "cold", "FedSlice"),
)  # fmt: skip


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    rounds = options.settings[waiting.WAITING]
    case = {"experiment": waiting.WAITING, "name": "all", "data": options.data, "rounds": rounds}
    waited = record.by_seed(record.of(lines, **case))
    for seed in options.seeds_or(range(SEEDS)):
        yield Trial(case, seed, alone=True)
        if seed in waited:
            given = {"message_s": waited[seed]["metrics"]["message_s"]}
            yield Trial(case | {"experiment": waiting.EMULATED}, seed, given)
    throttled = [line for line in lines if "workload" in line["case"]]
    real = [line for line in throttled if not line["case"]["foretold"]]
    found = list(racing(options, real))
    yield from found
    done = {line_key(line["case"], line["seed"]) for line in real}
    for trial in found:
        base = base_of(trial.case, trial.seed, real)
        # Nothing can be predicted from a run whose messages were not timed.
        nodes = base["metrics"]["nodes"] if base else {}
        if nodes and line_key(trial.case, trial.seed) in done:
            case = trial.case | {"experiment": f"foretold-{trial.case['experiment']}"}
            given = dict(trial.given) | {"nodes": nodes}
            yield Trial(case | {"foretold": True}, trial.seed, given, alone=True)


def racing(options: Options, real: list[Line]) -> Iterator[Trial]:
    for seed, entry in product(options.seeds_or(range(SEEDS)), ORDER):
        case = {"experiment": entry.experiment, **entry._asdict(), "foretold": False}
        rounds = options.settings.get(entry.experiment, options.settings[entry.workload])
        case |= {"data": options.data, "rounds": rounds}
        base = base_of(case, seed, real)
        if entry.name == BASE:
            yield Trial(case, seed, alone=True)
        elif base is not None:
            budget_s = options.settings["late"] * base["curve"]["seconds"][-1]
            given = {"target": base["metrics"]["target"], "budget_s": round(budget_s, 1)}
            yield Trial(case, seed, given, alone=True)


def base_of(case: Case, seed: int, real: list[Line]) -> Line | None:
    """Return FedAvg's line for the same work and nodes."""
    same = {key: case[key] for key in ("workload", "node", "data", "rounds")}
    return record.by_seed(record.of(real, name=BASE, **same)).get(seed)


def line_key(case: Case, seed: int) -> str:
    return record.key_of({"case": case, "seed": seed})


def run(
    case: Case,
    seed: int,
    data: Data,
    target: float | None = None,
    budget_s: float = inf,
    nodes: dict[str, dict[str, float]] | None = None,
    message_s: float | None = None,
) -> dict[str, Any]:
    if "workload" not in case:
        with tempfile.TemporaryDirectory() as folder:
            if message_s is None:
                return waiting.run(data, seed, case["rounds"], Path(folder))
            return waiting.run_emulated(data, seed, case["rounds"], message_s, Path(folder))
    workload = WORKLOADS[case["workload"]]
    warm = case["node"] == "warm"
    dataset = workload.dataset(data)
    config = workload.run_config(case["name"], dataset, seed, case["rounds"])
    devices = fleet()
    if nodes is not None:
        return foretell(config, devices, nodes, warm, target, budget_s)
    config |= {"fleet": "real"}
    if target is not None:
        config |= {"target-accuracy": target, "time-budget-s": budget_s}
    with tempfile.TemporaryDirectory() as folder:
        return race(Path(folder), devices, workload.cpu, warm, config)
