"""A small task to try settings with: generated data, and a network in NumPy, for runs are many."""

from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord

from flwr_hetero_studies.race.network import Labelled, record_of
from flwr_hetero_studies.race.node import NUMPY, Learning

CLASSES, GROUPS, DIM, HIDDEN = 10, 4, 24, 48
"""Classes, groups of examples within each, inputs, hidden units."""
NOISE = 1.1
"""Standard deviation within a group, where the groups' centres have 1."""
EXAMPLES, TEST, BATCH_SIZE = 128, 1000, 8
"""Of a node on average, to test on, of a batch."""
RATES = {"sgd": 0.1, "momentum": 0.02, "adam": 0.01}
"""By the nodes' optimizer, such that FedAvg ends alike."""


def run_config(optimizer: str = "sgd") -> tuple[tuple[str, float], ...]:
    return ("batch-size", BATCH_SIZE), ("learning-rate", RATES[optimizer])


class SmallTask(Learning):
    """What the nodes hold and train; no example is held out."""

    @property
    def splits(self) -> dict[str, Labelled]:
        return generated(self)

    def first(self) -> ArrayRecord:
        rng = np.random.default_rng([self.seed, 1])
        shapes = ((DIM, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
        # by He: rectified units keep the size of what goes in
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
        # all classes equally often, so that only the partition makes nodes differ
        labels = np.arange(count) % CLASSES
        chosen = centres[labels, rng.integers(GROUPS, size=count)]
        found[name] = Labelled(chosen + NOISE * rng.standard_normal((count, DIM)), labels)
    return found
