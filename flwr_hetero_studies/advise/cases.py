"""Whether ``flwr-hetero advise`` ranks settings as runs on other data then do."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from flwr_hetero_studies.advise.advice import PARTITIONS, advise
from flwr_hetero_studies.advise.candidates import candidates
from flwr_hetero_studies.advise.fleet import read_fleet
from flwr_hetero_studies.advise.simulate import Point as Look
from flwr_hetero_studies.advise.simulate import Work, target_of
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, by_seed, of
from flwr_hetero_studies.race.node import NUMPY, Task, client_app, first_model
from flwr_hetero_studies.race.watch import Quality

NODES, PER_ROUND, BATCH, MODEL_MB = 20, 3, 16, 0.318
FLEETS = ("two-kinds", "few-stragglers", "phones")
BASE = "FedAvg"
SETTINGS = {"rounds": 40, "rows": 6000, "seconds": 60.0, "rate": 0.1}
FAST = {"rounds": 10, "rows": 1000, "seconds": 1.0}
FAST_CASES = ["two-kinds*"]


@dataclass(frozen=True)
class Images:
    """The network of the race on images."""

    task: Task
    seed: int

    @property
    def app(self) -> ClientApp:
        """What a node does."""
        return client_app(self.task)

    def first(self) -> ArrayRecord:
        """Draw the initial model."""
        return first_model(self.task, self.seed)

    def measure(self, arrays: ArrayRecord, slow: list[int]) -> tuple[float, float]:
        """Return accuracy on all test images, and on classes as these nodes hold them."""
        quality = Quality(self.task, "test", self.seed, np.array(slow))
        return quality.of({name: array.numpy() for name, array in arrays.items()})


def fleet_file(name: str) -> str:
    return str(Path(__file__).with_name(f"{name}.toml"))


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield the advice, FedAvg's runs, and then those of the other settings."""
    shared = {"data": options.data, **options.settings}
    for fleet in FLEETS:
        yield Trial({"experiment": fleet, "name": "advice", **options.settings})
        for partition in PARTITIONS.values():
            where = {"experiment": fleet, "partition": partition, **shared}
            bases = by_seed(of(lines, name=BASE, **where))
            for seed in options.seeds_or(range(3)):
                yield Trial({"name": BASE, **where}, seed)
                for choice in candidates(NODES, PER_ROUND)[1:] if seed in bases else []:
                    target = target_of(looks(bases[seed]))
                    yield Trial({"name": choice.name, **where}, seed, {"target": target})


def looks(line: Line) -> list[Look]:
    """Read the looks at a run's model."""
    return [Look(*values) for values in zip(*line["curve"].values(), strict=True)]


def run(case: Case, seed: int, data: Data, target: float | None = None) -> dict[str, Any]:
    """Ask for advice, or train one setting until FedAvg's end less a point."""
    fleet = fleet_file(case["experiment"])
    examples = case["rows"] // NODES
    if case["name"] == "advice":
        known: dict[str, Any] = {"nodes": NODES, "clients_per_round": PER_ROUND}
        known |= {"examples": examples, "batch_size": BATCH, "model_mb": MODEL_MB}
        found = advise(fleet, seconds=case["seconds"], jobs=1, **known).as_dict()
        return {"metrics": {"order": found["order"], "settings": found["settings"]}}
    rows, test = case["rows"], max(case["rows"] // 3, 100)
    source = data.first(rows + BATCH, test)
    task = Task(source, NUMPY, case["partition"], NODES, rows, BATCH, test)
    devices = tuple(read_fleet(fleet, NODES, examples, MODEL_MB))
    choice = next(c for c in candidates(NODES, PER_ROUND) if c.name == case["name"])
    config = {"learning-rate": case["rate"], "batch-size": BATCH, "seed": seed}
    work = Work(
        choice, Images(task, seed), devices, examples // BATCH, PER_ROUND, case["rounds"],
        seed, target, tuple(config.items()),
    )  # fmt: skip
    points = work.run()
    curve = {name: [round(getattr(p, name), 6) for p in points] for name in Look._fields}
    return {"metrics": {"looks": len(curve["accuracy"])}, "curve": curve}
