"""A network of one hidden layer in NumPy: the steps of the apps' loop, five times as fast."""

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

# Twenty nodes of the waiting race load this module at the same time, without torch.
if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler
    from flwr_hetero_studies.tasks.training import TrainResult

Values: TypeAlias = NDArray[Any]
Rows: TypeAlias = NDArray[np.int64]
Network: TypeAlias = Sequence[Values]
"""Weights (units, inputs) and biases (units,) of the hidden layer, then those of the output."""
MOMENTUM = 0.9
BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""The values of SGD with momentum, and torch's defaults for Adam."""


class Labelled(NamedTuple):
    """Inputs (examples, inputs) and their labels (examples,)."""

    inputs: Values
    labels: Rows

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Rows | slice) -> "Labelled":
        return Labelled(self.inputs[rows], self.labels[rows])


def forward(net: Network, inputs: Values) -> tuple[Values, Values]:
    # The layout is that of torch.nn.Linear: a row of weights for each unit.
    hidden = np.maximum(inputs @ net[0].T + net[1], 0)
    return hidden, hidden @ net[2].T + net[3]


def losses_of(logits: Values, labels: Rows) -> tuple[Values, Values]:
    """Return each example's cross entropy, and its gradient by the logits."""
    # Subtract the largest logit, so that no exponential overflows.
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    losses = -np.log(np.maximum(probs[rows, labels], 1e-30))
    probs[rows, labels] -= 1
    return losses, probs


class Optimizer:
    """SGD, SGD with momentum or Adam, as in torch; ``state`` has its running means."""

    def __init__(self, name: str = "sgd", state: Sequence[Values] = ()) -> None:
        self.name = name
        self.state = [array.copy() for array in state]

    def step(self, slopes: Sequence[Values], lr: float) -> list[Values]:
        """Return what is to be subtracted from each array."""
        if self.name == "sgd":
            return [lr * slope for slope in slopes]
        if self.name == "momentum":
            old = self.state or [np.zeros_like(slope) for slope in slopes]
            self.state = [MOMENTUM * v + slope for v, slope in zip(old, slopes, strict=True)]
            return [lr * v for v in self.state]
        first, second = BETAS
        size = len(slopes)
        old = self.state or [*(np.zeros_like(s) for s in (*slopes, *slopes)), np.zeros(1)]
        count = old[-1] + 1
        means = [first * m + (1 - first) * s for m, s in zip(old, slopes, strict=False)]
        squares = [
            second * v + (1 - second) * s * s for v, s in zip(old[size:], slopes, strict=False)
        ]
        self.state = [*means, *squares, count]
        # Correct both biases towards the zeros at the start.
        rate = lr / (1 - first ** count[0])
        root = sqrt(1 - second ** count[0])
        both = zip(means, squares, strict=True)
        return [(rate * m / (np.sqrt(v) / root + EPSILON)).astype(m.dtype) for m, v in both]


def descend(
    net: Network,
    examples: Labelled,
    lr: float,
    pull: Network = (),
    mu: float = 0.0,
    optimizer: Optimizer | None = None,
) -> Values:
    """Take a step in place, by default of SGD, with FedProx's pull to a network; return losses."""
    hidden, logits = forward(net, examples.inputs)
    losses, error = losses_of(logits, examples.labels)
    error /= len(error)
    back = (error @ net[2]) * (hidden > 0)
    slopes = (back.T @ examples.inputs, back.sum(axis=0), error.T @ hidden, error.sum(axis=0))
    if mu:
        for array, slope, goal in zip(net, slopes, pull, strict=True):
            slope += mu * (array - goal)
    for array, change in zip(net, (optimizer or Optimizer()).step(slopes, lr), strict=True):
        array -= change
    return losses


def train_numpy(
    net: Network,
    examples: Labelled,
    sampler: "BatchSampler",
    count: int,
    lr: float,
    mu: float = 0.0,
    optimizer: Optimizer | None = None,
) -> "TrainResult":
    from flwr_hetero_studies.tasks.training import TrainResult

    # FedProx pulls to the model that the server sent.
    start = [array.copy() for array in net] if mu else []
    total = 0.0
    square = 0.0
    processed = 0
    for _ in range(count):
        indices, _ = sampler.next_batch()
        losses = descend(net, examples.at(indices), lr, start, mu, optimizer)
        # Samplers that learn from losses see those before the step.
        sampler.update(indices, losses.astype(np.float64))
        total += float(losses.sum())
        square += float(losses @ losses)
        processed += len(indices)
    return TrainResult(count, processed, 0, total / processed, sqrt(square / processed))


def network_of(arrays: ArrayRecord) -> list[Values]:
    return [array.numpy().copy() for array in arrays.values()]


def record_of(net: Network) -> ArrayRecord:
    return ArrayRecord({str(number): Array(array) for number, array in enumerate(net)})


def accuracies(logits: Values, labels: Rows, held: Rows) -> tuple[float, float]:
    """Return accuracy on all examples, and with classes weighted by how often nodes hold them."""
    right = logits.argmax(1) == labels
    size = int(max(labels.max(), held.max())) + 1
    # A class without a test example counts as wrong.
    counts = np.maximum(np.bincount(labels, minlength=size), 1)
    by_class = np.bincount(labels, right, size) / counts
    return float(right.mean()), float(np.bincount(held, minlength=size) / len(held) @ by_class)
