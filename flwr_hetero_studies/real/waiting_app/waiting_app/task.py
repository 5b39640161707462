"""A network of one hidden layer in NumPy, and the data that the study has divided."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

DATA = "waiting.npz"
HIDDEN = 100
Values = NDArray[Any]


class Images(NamedTuple):
    """Inputs (examples, pixels) and their labels (examples,)."""

    inputs: Values
    labels: Values


class Batches:
    """The batches of a pass over a node's examples, which are in a new order in each pass."""

    def __init__(self, examples: Images, batch_size: int, seed: list[int]) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self.examples.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Images]:
        order = self.rng.permutation(len(self.examples.labels))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield Images(self.examples.inputs[rows], self.examples.labels[rows])


def load(folder: str, part: str) -> Images:
    """Read the examples of a node, by the number of its partition, or those of ``test``."""
    with np.load(Path(folder) / DATA) as file:
        rows = file[f"rows-{part}"]
        return Images(file["inputs"][rows].astype(np.float32), file["labels"][rows])


def first_model(pixels: int, classes: int, seed: int) -> list[Values]:
    """Draw the weights (units, inputs) and biases (units,) of both layers as torch does."""
    rng = np.random.default_rng(seed)
    model = []
    for inputs, units in ((pixels, HIDDEN), (HIDDEN, classes)):
        bound = inputs**-0.5
        model.append(rng.uniform(-bound, bound, (units, inputs)).astype(np.float32))
        model.append(rng.uniform(-bound, bound, units).astype(np.float32))
    return model


def forward(model: list[Values], inputs: Values) -> tuple[Values, Values]:
    """Return the hidden layer and the probabilities of the classes."""
    hidden = np.maximum(inputs @ model[0].T + model[1], 0)
    logits = hidden @ model[2].T + model[3]
    # Without the largest logit no exponential overflows.
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def step(model: list[Values], batch: Images, rate: float) -> float:
    """Take a step of SGD in place; return the mean cross entropy before it."""
    hidden, probs = forward(model, batch.inputs)
    rows = np.arange(len(batch.labels))
    loss = -np.log(np.maximum(probs[rows, batch.labels], 1e-30)).mean()
    probs[rows, batch.labels] -= 1
    error = probs / len(rows)
    back = (error @ model[2]) * (hidden > 0)
    slopes = (back.T @ batch.inputs, back.sum(axis=0), error.T @ hidden, error.sum(axis=0))
    for array, slope in zip(model, slopes, strict=True):
        array -= rate * slope
    return float(loss)


def as_record(model: list[Values]) -> ArrayRecord:
    return ArrayRecord({str(number): Array(array) for number, array in enumerate(model)})


def as_model(arrays: ArrayRecord) -> list[Values]:
    return [array.numpy().copy() for array in arrays.values()]
