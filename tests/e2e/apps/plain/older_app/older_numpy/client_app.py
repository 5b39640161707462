"""What a client does: softmax regression on the digits, by the older API."""

import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits


def probabilities(w, inputs):
    """Return those of the classes; shape (len(inputs), 10)."""
    scores = np.exp(inputs @ w)
    return scores / scores.sum(1, keepdims=True)


class DigitsClient(NumPyClient):
    """A client with its own part of the digits."""

    def __init__(self, partition, count):
        inputs, labels = load_digits(return_X_y=True)
        self.inputs, self.labels = inputs[partition::count] / 16, labels[partition::count]

    def fit(self, parameters, config):
        """Train for an epoch."""
        (w,) = parameters
        batches = np.array_split(np.arange(len(self.labels)), 12)
        for batch in batches:
            inputs, labels = self.inputs[batch], np.eye(10)[self.labels[batch]]
            w = w - 0.5 * inputs.T @ (probabilities(w, inputs) - labels) / len(batch)
        return [w], len(self.labels), {}

    def evaluate(self, parameters, config):
        """Return the loss."""
        found = probabilities(parameters[0], self.inputs)
        loss = -np.log(found[np.arange(len(self.labels)), self.labels]).mean()
        return float(loss), len(self.labels), {"eval_loss": float(loss)}


def client_fn(context):
    """Make a client."""
    config = context.node_config
    return DigitsClient(int(config["partition-id"]), int(config["num-partitions"])).to_client()


app = ClientApp(client_fn=client_fn)
