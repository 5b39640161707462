"""Model and data."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

BATCH_SIZE = 16


class Batches:
    """Examples, batch by batch."""

    def __init__(self, inputs, targets, batch_sampler):
        self.inputs = inputs
        self.targets = targets
        self.batch_sampler = batch_sampler

    def __iter__(self):
        for rows in self.batch_sampler:
            yield self.inputs[rows], self.targets[rows]


def load_data(partition_id, num_partitions):
    """Give a node its own part of the digits."""
    inputs, targets = load_digits(return_X_y=True)
    mine = np.arange(partition_id + len(targets) // 5, len(targets), num_partitions)
    return inputs[mine] / 16, targets[mine]


def make_model(coefficients, intercepts):
    """Make a classifier with these coefficients."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, random_state=0)
    model.classes_ = np.arange(10)
    model.coef_ = coefficients.copy()
    model.intercept_ = intercepts.copy()
    return model
