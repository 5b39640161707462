"""What methods cost: large fleets, large models, simulators, and CPU time in apps."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.cost import apps, models, renewal, scale, simulators

EXPERIMENTS = {"scale": scale, "models": models, "simulators": simulators, "apps": apps}
SETTINGS: dict[str, Any] = {}
FAST: dict[str, Any] = {}
FAST_CASES = ["scale/FedAvg, 20 of 100 nodes, *", "scale/FedSlice, 20 of 100 nodes, *"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from scale.plan(options)
    yield from renewal.plan(options)
    yield from models.plan(options)
    yield from simulators.plan(options)
    yield from apps.plan()


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    if case["experiment"] == "renewal":
        return {"metrics": renewal.run(case, data, seed)}
    return {"metrics": EXPERIMENTS[case["experiment"]].run(case, data)}
