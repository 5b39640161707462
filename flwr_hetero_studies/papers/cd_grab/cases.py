"""CD-GraB: herding bounds of fixed vectors, training with every order, the server's speed."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.cd_grab import fixed, server_speed, training

SETTINGS = {"rounds": 40, "epochs": 24}
"""Rounds of the fleets, most epochs of training."""
FAST = {"rounds": 3, "epochs": 1}
FAST_CASES = ["sketch/softmax, CD-GraB, k = 64", "fleet/*lost, CD-GraB, *",
              "softmax, 4 nodes/*", "optimum/*1024*",
              "server round/*, 8 nodes"]  # fmt: skip
FIXED, SPEED = ("sketch", "fleet"), ("pair balance", "server round")


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield all runs."""
    for part in (fixed, training, server_speed):
        yield from part.plan(options)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Run a case of any kind."""
    if case["experiment"] in SPEED:
        return server_speed.run(case)
    part = fixed if case["experiment"] in FIXED else training
    return part.run(case, seed, data.source)
