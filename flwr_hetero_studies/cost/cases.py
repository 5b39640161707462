"""What methods cost: large fleets, simulations, memory of a node, CPU time in apps, of a codec."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.cost import apps, codec, engines, memory, scale

SETTINGS: dict[str, Any] = {"rounds": 100, "nodes": 1000, "ray-rounds": 3}
FAST = {"rounds": 5}
FAST_CASES = ["scale/*100 nodes*"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from scale.plan(options.settings["rounds"])
    yield from memory.plan(options)
    yield from apps.plan()
    yield from codec.plan()
    yield from engines.plan(options.settings["nodes"], options.settings["ray-rounds"])


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    own = {"scale": scale, "memory": memory, "apps": apps, "codec": codec}
    own |= {"ray": engines, "speed": engines}
    return {"metrics": own[case["experiment"]].run(case, data)}
