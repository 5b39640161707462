"""A small task to try many settings with: generated data and a network in NumPy."""

from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord

from flwr_hetero_studies.race.network import Labelled, record_of
from flwr_hetero_studies.race.node import NUMPY, Learning

CLASSES = 10
GROUPS = 4
"""Groups of examples within a class."""
DIM = 24
"""Inputs of an example."""
HIDDEN = 48
NOISE = 1.1
"""Standard deviation within a group; that of the groups' centres is 1."""
EXAMPLES = 128
"""Examples of a node on average."""
TEST = 1000
BATCH_SIZE = 8
RATES = {"sgd": 0.1, "momentum": 0.02, "adam": 0.01}
"""Rates by the nodes' optimizer, with which FedAvg ends at about the same accuracy."""


def run_config(optimizer: str = "sgd") -> tuple[tuple[str, float], ...]:
    return ("batch-size", BATCH_SIZE), ("learning-rate", RATES[optimizer])


class SmallTask(Learning):
    """The generated data and the network; no example is held out."""

    @property
    def splits(self) -> dict[str, Labelled]:
        return generated(self)

    def first(self) -> ArrayRecord:
        rng = np.random.default_rng([self.seed, 1])
        shapes = ((DIM, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
        # With He's initialisation, rectified units keep the scale of their inputs.
        scale = [2 / s[0] if len(s) == 2 else 0.0 for s in shapes]
        drawn = (rng.standard_normal(s) * v**0.5 for s, v in zip(shapes, scale, strict=True))
        return record_of([np.ascontiguousarray(array.T) for array in drawn])

    def cut(self, count: int) -> int:
        return count


def small_task(
    num_nodes: int,
    examples: int = EXAMPLES,
    partition: str = "dirichlet",
    seed: int = 0,
    optimizer: str = "sgd",
) -> SmallTask:
    rows = num_nodes * examples, 0, TEST
    return SmallTask("generated", NUMPY, partition, num_nodes, rows, seed, optimizer)


@lru_cache(maxsize=8)
def generated(task: SmallTask) -> dict[str, Labelled]:
    centres = np.random.default_rng([task.seed, 2]).standard_normal((CLASSES, GROUPS, DIM))
    train, _, test = task.rows
    found = {}
    for split, (name, count) in enumerate((("test", test), ("train", train))):
        rng = np.random.default_rng([task.seed, 3, split])
        # All classes are equally frequent, so that nodes differ only by the partition.
        labels = np.arange(count) % CLASSES
        chosen = centres[labels, rng.integers(GROUPS, size=count)]
        found[name] = Labelled(chosen + NOISE * rng.standard_normal((count, DIM)), labels)
    return found
