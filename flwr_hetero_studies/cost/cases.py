"""What methods cost: large fleets, memory of a node, CPU time in apps, CPU time of a codec."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.cost import apps, codec, memory, scale

EXPERIMENTS = {"scale": scale, "memory": memory, "apps": apps, "codec": codec}
SETTINGS: dict[str, Any] = {"rounds": 100}
FAST = {"rounds": 5}
FAST_CASES = ["scale/*100 nodes*"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    for experiment in EXPERIMENTS.values():
        yield from experiment.plan(options)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    return {"metrics": EXPERIMENTS[case["experiment"]].run(case, data)}
