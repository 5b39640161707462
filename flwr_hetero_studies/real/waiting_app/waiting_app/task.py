"""The data that the study has divided, and the first model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flwr_hetero_studies.race.network import Labelled, Values

DATA = "waiting.npz"
HIDDEN = 100


class Batches:
    """The batches of a pass over a node's examples, which are in a new order in each pass."""

    def __init__(self, examples: Labelled, batch_size: int, seed: list[int]) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[Labelled]:
        order = self.rng.permutation(len(self.examples))
        for start in range(0, len(order), self.batch_size):
            yield self.examples.at(order[start : start + self.batch_size])


def load(folder: str, part: str) -> Labelled:
    """Read the examples of a node, by the number of its partition, or those of ``test``."""
    with np.load(Path(folder) / DATA) as file:
        rows = file[f"rows-{part}"]
        return Labelled(file["inputs"][rows].astype(np.float32), file["labels"][rows])


def first_model(pixels: int, classes: int, seed: int) -> list[Values]:
    """Draw the weights (units, inputs) and biases (units,) of both layers as torch does."""
    rng = np.random.default_rng(seed)
    model = []
    for inputs, units in ((pixels, HIDDEN), (HIDDEN, classes)):
        bound = inputs**-0.5
        model.append(rng.uniform(-bound, bound, (units, inputs)).astype(np.float32))
        model.append(rng.uniform(-bound, bound, units).astype(np.float32))
    return model
