"""Tasks: the targets of examples, the loss of an output, and how good it is."""

from math import exp
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from flwr_hetero.errors import invalid
from flwr_hetero_studies.tasks.texts import CHARACTERS, PADDING

Outputs: TypeAlias = int | tuple[int, ...]
"""A model's output for an example: logits of so many classes, or an array of this shape."""
Values: TypeAlias = NDArray[Any]
AUTO = "auto"
HIGHEST_SMAPE = 2.0
LARGEST = 700.0
"""A loss whose exponential is still a float."""


class Task:
    """Classification, from which other tasks derive."""

    window = 0
    """Length of the windows, each an example, into which texts and series are cut.

    With 0 a text is one example of numbers of its words.
    """

    def divide(self, values: Values, labels: NDArray[np.int64]) -> tuple[Values, Values]:
        """Divide the values of a data set, (examples, ...), into inputs and targets."""
        return values, labels

    def outputs(self, targets: NDArray[Any], num_classes: int) -> Outputs:
        """Return the outputs for an example, given some targets and the number of labels."""
        return num_classes

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, (batch,)."""
        return cross_entropy(outputs, targets, reduction="none")

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how good the output for each example is, (batch,), from 0 to 1."""
        return (outputs.argmax(1) == targets).float()

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Return the task's own metrics, given the means of losses and accuracy."""
        return {}


class LanguageModel(Task):
    """The next character of a text; loss, accuracy and perplexity are means over characters."""

    window = 65

    def divide(self, values: Values, labels: NDArray[np.int64]) -> tuple[Values, Values]:
        if values.ndim != 2 or values.dtype.kind not in "iu":
            raise invalid("task", "language-model", "have texts to learn from")
        return np.ascontiguousarray(values[:, :-1]), np.ascontiguousarray(values[:, 1:])

    def outputs(self, targets: NDArray[Any], num_classes: int) -> Outputs:
        return targets.shape[1], CHARACTERS

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy over the characters without padding."""
        losses = cross_entropy(outputs.mT, targets, reduction="none", ignore_index=PADDING)
        return losses.sum(1) / num_characters(targets)

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        right = (outputs.argmax(2) == targets) & (targets != PADDING)
        return right.sum(1) / num_characters(targets)

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"perplexity": exp(min(loss, LARGEST))}


def num_characters(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum(1).clamp(min=1)


class Forecasting(Task):
    r"""The next values of a series; the loss is the mean of squared errors over the horizon.

    Each window is divided by the mean size of its inputs. The task's own metric is the symmetric
    mean absolute percentage error, and accuracy is :math:`1 - \mathrm{SMAPE} / 2`:

    .. math:: \mathrm{SMAPE} = \frac{1}{h} \sum_t \frac{2 |\hat y_t - y_t|}{|\hat y_t| + |y_t|}
              \in [0, 2]
    """

    # The values of CD-GraB, appendix D.1, for M4.
    inputs = 20
    horizon = 6
    window = inputs + horizon

    def divide(self, values: Values, labels: NDArray[np.int64]) -> tuple[Values, Values]:
        """Return inputs of shape (examples, 1, inputs), and the values of the horizon."""
        if values.ndim != 2 or values.dtype.kind != "f":
            raise invalid("task", "forecasting", "have series to learn from")
        # The size must not depend on the horizon, which is to be predicted.
        size = np.abs(values[:, : -self.horizon]).mean(1, keepdims=True)
        scaled = (values / np.where(size > 0, size, 1)).astype(np.float32)
        inputs, targets = np.split(scaled, [-self.horizon], axis=1)
        return np.ascontiguousarray(inputs[:, None]), np.ascontiguousarray(targets)

    def outputs(self, targets: NDArray[Any], num_classes: int) -> Outputs:
        return (targets.shape[1],)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).square().mean(1)

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # A forecast of 0 for 0 has no error.
        sizes = (outputs.abs() + targets.abs()).clamp(min=1e-12)
        smape = HIGHEST_SMAPE * ((outputs - targets).abs() / sizes).mean(1)
        return 1 - smape / HIGHEST_SMAPE

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"smape": HIGHEST_SMAPE * (1 - accuracy)}


CLASSIFICATION = Task()
TASKS: dict[str, Task] = {
    "classification": CLASSIFICATION,
    "language-model": LanguageModel(),
    "forecasting": Forecasting(),
}
