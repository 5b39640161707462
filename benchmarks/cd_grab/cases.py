"""CD-GraB: herding bounds of fixed vectors, training with every order, the server's speed."""

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Data, Options, Run
from benchmarks.cd_grab import fixed, server_speed, training
from benchmarks.tables import Case, Line

SETTINGS = {"vectors": 65_536, "rounds": 40, "epochs": 24}
"""Vectors of Fig. 10 (the paper has 1,000,000), rounds of the fleets, most epochs of training."""
FAST = {"vectors": 4096, "rounds": 3, "epochs": 1}
FAST_CASES = ["fig10/*, 5 nodes", "sketch/softmax, CD-GraB, k = 64", "fleet/*lost, CD-GraB, *",
              "softmax, 4 nodes/*", "optimum/*1024*",
              "server round/*, 8 nodes"]  # fmt: skip
FIXED, SPEED = ("fig10", "sketch", "fleet"), ("pair balance", "server round")


def plan(options: Options, lines: list[Line]) -> Iterator[Run]:
    """Yield all runs."""
    for part in (fixed, training, server_speed):
        yield from part.plan(options)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Run a case of any kind."""
    if case["experiment"] in SPEED:
        return server_speed.run(case)
    part = fixed if case["experiment"] in FIXED else training
    return part.run(case, seed, data.source)
