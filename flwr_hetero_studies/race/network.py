"""A network of one hidden layer in NumPy: the steps of the apps' loop, five times sooner."""

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero_studies.tasks.training import TrainResult

Values: TypeAlias = NDArray[Any]
Rows: TypeAlias = NDArray[np.int64]
Network: TypeAlias = Sequence[Values]
"""Weights (units, inputs) and biases of the hidden layer, and of the output."""


class Labelled(NamedTuple):
    """Inputs and their labels."""

    inputs: Values
    labels: Rows

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Rows | slice) -> "Labelled":
        return Labelled(self.inputs[rows], self.labels[rows])


def forward(net: Network, inputs: Values) -> tuple[Values, Values]:
    # the layout of torch.nn.Linear: a row of weights for each unit
    hidden = np.maximum(inputs @ net[0].T + net[1], 0)
    return hidden, hidden @ net[2].T + net[3]


def losses_of(logits: Values, labels: Rows) -> tuple[Values, Values]:
    """Return each example's cross entropy, and its gradient by the logits."""
    # the largest is taken off, so that no exponential overflows
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    losses = -np.log(np.maximum(probs[rows, labels], 1e-30))
    probs[rows, labels] -= 1
    return losses, probs


def descend(
    net: Network, examples: Labelled, lr: float, pull: Network = (), mu: float = 0.0
) -> Values:
    """Take one step of SGD in place, pulled to a network by FedProx's mu; return the losses."""
    hidden, logits = forward(net, examples.inputs)
    losses, error = losses_of(logits, examples.labels)
    error /= len(error)
    back = (error @ net[2]) * (hidden > 0)
    slopes = (back.T @ examples.inputs, back.sum(axis=0), error.T @ hidden, error.sum(axis=0))
    for number, (array, slope) in enumerate(zip(net, slopes, strict=True)):
        if mu:
            slope += mu * (array - pull[number])
        slope *= lr
        array -= slope
    return losses


def train_numpy(
    net: Network, examples: Labelled, sampler: BatchSampler, count: int, lr: float, mu: float = 0.0
) -> TrainResult:
    # FedProx pulls to the model that the server sent
    start = [array.copy() for array in net] if mu else []
    total, square, processed = 0.0, 0.0, 0
    for _ in range(count):
        indices, _ = sampler.next_batch()
        losses = descend(net, examples.at(indices), lr, start, mu)
        # samplers that learn from losses see those before the step
        sampler.update(indices, losses.astype(np.float64))
        total, square = total + float(losses.sum()), square + float(losses @ losses)
        processed += len(indices)
    return TrainResult(count, processed, 0, total / processed, sqrt(square / processed))


def network_of(arrays: ArrayRecord) -> list[Values]:
    return [array.numpy().copy() for array in arrays.values()]


def record_of(net: Network) -> ArrayRecord:
    return ArrayRecord({str(number): Array(array) for number, array in enumerate(net)})


def accuracies(logits: Values, labels: Rows, held: Rows) -> tuple[float, float]:
    """Return accuracy on all examples, and on classes as often as some nodes hold them."""
    right = logits.argmax(1) == labels
    size = int(max(labels.max(), held.max())) + 1
    # a class without a test example counts as wrong
    counts = np.maximum(np.bincount(labels, minlength=size), 1)
    by_class = np.bincount(labels, right, size) / counts
    return float(right.mean()), float(np.bincount(held, minlength=size) / len(held) @ by_class)
