"""The paper's tasks as units to be ordered: a table, and what data sets hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from flwr_hetero_studies.tasks import (
    Examples,
    data_shape,
    evaluate,
    load_partition,
    load_test,
    make_model,
)

TABLE_SHAPE = (18, 1, 1)
"""As many columns as the mortgage table has."""
TRAITS = 5


@dataclass(frozen=True)
class OrderTask:
    """What is trained: units of some examples each, and how a model is measured."""

    train: Examples
    test: Examples
    make_model: Callable[[int], nn.Module]
    """Builds a model from a seed."""
    per_unit: int = 1
    metric: str = "accuracy"
    vectorised: bool = True
    """Whether the model's layers have vectorised gradients; torch's LSTM has none."""

    def __len__(self) -> int:
        return len(self.train) // self.per_unit

    def look(self, model: nn.Module) -> dict[str, float]:
        test_loss, accuracy = evaluate(model, self.test)
        metrics = {"accuracy": accuracy} | self.test.task.metrics(test_loss, accuracy)
        return {"loss": evaluate(model, self.train)[0], "metric": metrics[self.metric]}


def table(num_rows: int, num_tests: int) -> OrderTask:
    """Draw a table of applications, rows to train on and rows to test on.

    Six columns are amounts, twelve are codes; all follow five hidden traits of an applicant. The
    answer is drawn with the probability that a logistic model of the traits gives.
    """
    rng = np.random.default_rng(18)
    count = num_rows + num_tests
    traits = rng.normal(size=(count, TRAITS))
    mixing = rng.normal(size=(TRAITS, 18))
    columns = traits @ mixing + rng.normal(size=(count, 18))
    # amounts are skewed, codes are few whole numbers
    columns[:, :6] = np.exp(0.5 * columns[:, :6])
    columns[:, 6:] = np.floor(columns[:, 6:] / rng.uniform(1, 4, 12)).clip(-2, 2)
    columns = (columns - columns.mean(0)) / columns.std(0)
    answers = rng.random(count) < 1 / (1 + np.exp(-4 * traits.sum(1) / np.sqrt(TRAITS)))
    inputs = torch.from_numpy(columns.astype(np.float32)).reshape(-1, *TABLE_SHAPE)
    every = Examples(inputs, torch.from_numpy(answers.astype(np.int64)))
    test = replace(every, inputs=inputs[num_rows:], targets=every.targets[num_rows:])
    return OrderTask(
        first(every, num_rows), test, lambda seed: make_model("softmax", TABLE_SHAPE, 2, seed)
    )


def given(
    dataset: str,
    model: str,
    num_units: int,
    *,
    task: str = "auto",
    per_unit: int = 1,
    metric: str = "accuracy",
    num_tests: int = 10_000,
    seed: int = 0,
) -> OrderTask:
    """Take the first units of a data set, and of its test examples."""
    whole = load_partition(dataset, 0, 1, task=task, seed=seed)
    test = load_test(dataset, task)
    shape = data_shape(dataset, task)
    return OrderTask(
        first(whole, min(len(whole), num_units * per_unit) // per_unit * per_unit),
        first(test, num_tests),
        lambda seed: make_model(model, *shape, seed),
        per_unit=per_unit,
        metric=metric,
        vectorised=model != "lstm-lm",
    )


def first(examples: Examples, count: int) -> Examples:
    """Take the first examples; load_partition has shuffled them."""
    return replace(examples, inputs=examples.inputs[:count], targets=examples.targets[:count])
