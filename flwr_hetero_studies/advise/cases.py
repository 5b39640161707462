"""Whether ``flwr-hetero advise`` ranks settings like runs on other data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr_hetero_studies.advise.advice import PARTITIONS, advise
from flwr_hetero_studies.advise.candidates import Candidate, candidates
from flwr_hetero_studies.advise.fleet import is_limited, read_fleet
from flwr_hetero_studies.advise.simulate import Point, Simulation, target_of
from flwr_hetero_studies.core.curves import columns, rounded
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, by_seed, of
from flwr_hetero_studies.race.methods import BASE
from flwr_hetero_studies.race.node import NUMPY, Learning

NODES = 20
PER_ROUND = 3
BATCH = 16
MODEL_MB = 0.318
FLEETS = ("two-kinds", "few-stragglers", "phones")
SETTINGS = {"rounds": 40, "rows": 6000, "seconds": 60.0, "rate": 0.1}
FAST = {"rounds": 10, "rows": 1000, "seconds": 1.0}
FAST_CASES = ["two-kinds*"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    shared = {"data": options.data, **options.settings}
    for fleet in FLEETS:
        yield Trial({"experiment": fleet, "name": "advice", **options.settings})
        for partition in PARTITIONS.values():
            where = {"experiment": fleet, "partition": partition, **shared}
            bases = by_seed(of(lines, name=BASE, **where))
            for seed in options.seeds_or(range(3)):
                yield Trial({"name": BASE, **where}, seed)
                for choice in settings_of(fleet)[1:] if seed in bases else []:
                    target = target_of(looks(bases[seed]))
                    yield Trial({"name": choice.name, **where}, seed, {"target": target})


def settings_of(fleet: str) -> list[Candidate]:
    devices = read_fleet(file_of(fleet), NODES, 1, MODEL_MB)
    return candidates(NODES, PER_ROUND, limited=is_limited(devices))


def file_of(fleet: str) -> str:
    return str(Path(__file__).with_name(f"{fleet}.toml"))


def looks(line: Line) -> list[Point]:
    return [Point(*values) for values in zip(*line["curve"].values(), strict=True)]


def run(case: Case, seed: int, data: Data, target: float | None = None) -> dict[str, Any]:
    fleet = file_of(case["experiment"])
    rows = case["rows"]
    examples = rows // NODES
    # The advice gets the fleet and the sizes as a user would give them.
    if case["name"] == "advice":
        known: dict[str, Any] = {"nodes": NODES, "clients_per_round": PER_ROUND}
        known |= {"examples": examples, "batch_size": BATCH, "model_mb": MODEL_MB, "node": "none"}
        found = advise(fleet, seconds=case["seconds"], jobs=1, **known)
        speedups = {
            task: {name: row.speedup for name, row in rows.items()}
            for task, rows in found.rows.items()
        }
        return {"metrics": {"speedups": speedups}}
    test = max(rows // 3, 100)
    # The split to tune with is not used here, but must not be empty.
    source = data.first(rows + BATCH, test)
    learning = Learning(source, NUMPY, case["partition"], NODES, (rows, BATCH, test), seed)
    devices = tuple(read_fleet(fleet, NODES, examples, MODEL_MB))
    choice = next(c for c in settings_of(case["experiment"]) if c.name == case["name"])
    config = {"learning-rate": case["rate"], "batch-size": BATCH, "seed": seed}
    points = Simulation(
        choice, learning, devices, examples // BATCH, PER_ROUND, case["rounds"], seed, target,
        tuple(config.items()),
    ).run()  # fmt: skip
    curve = rounded(columns(point._asdict() for point in points), 6)
    return {"metrics": {"looks": len(points)}, "curve": curve}
