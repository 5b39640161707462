"""A client that descends to one goal, by the steps that the server asks for."""

import numpy as np
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp

from flwr_hetero.mod import hetero


class Older(NumPyClient):
    """Descend to 3."""

    def fit(self, parameters, config):
        (w,) = parameters
        for batch in hetero.batches([np.full(8, 3.0)] * 20, config):
            w = w + 0.1 * (batch.mean() - w)
        return [w], 160, {"train-loss": float(np.mean((w - 3.0) ** 2)), "name": "cpu"}

    def evaluate(self, parameters, config):
        return float(np.mean((parameters[0] - 3.0) ** 2)), 10, {"accuracy": 0.5}


def client_fn(context: Context) -> Client:
    """Make the node's client."""
    return Older().to_client()


app = ClientApp(client_fn=client_fn, mods=[hetero])
