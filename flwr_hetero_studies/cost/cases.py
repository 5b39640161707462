"""What methods cost: large fleets, CPU time in apps, and simulators."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.cost import apps, scale, simulators

EXPERIMENTS = {"scale": scale, "apps": apps, "simulators": simulators}
SETTINGS: dict[str, Any] = {"rounds": 100}
FAST = {"rounds": 5}
FAST_CASES = ["scale/*100 nodes*"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from scale.plan(options)
    yield from apps.plan()
    yield from simulators.plan(options)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    return {"metrics": EXPERIMENTS[case["experiment"]].run(case, data)}
