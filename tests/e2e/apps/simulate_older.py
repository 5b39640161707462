"""Train a NumPyClient of Flower's older API in a plain simulation: ``simulate_older.py FILE``."""

import json
import sys
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from flwr_hetero.mod import hetero
from flwr_hetero.older import OlderClients
from flwr_hetero.strategy import BiasedLocalSGD, FedSlice, TiFL

NODES, GOAL = 4, 3.0


class Client(NumPyClient):
    """Descend to a goal that depends on the node."""

    def __init__(self, partition):
        self.goal = GOAL + partition

    def fit(self, parameters, config):
        """Take the steps that the server asks for."""
        (w,) = parameters
        for batch in hetero.batches([np.full(8, self.goal)] * 20, config):
            w = w + config["lr"] * (batch.mean() - w)
        return [w], 160, {"train-loss": float(np.mean((w - self.goal) ** 2)), "name": "cpu"}

    def evaluate(self, parameters, config):
        """Return the loss."""
        return float(np.mean((parameters[0] - self.goal) ** 2)), 10, {"accuracy": 0.5}


def client_fn(context):
    """Make the node's client."""
    return Client(int(context.node_config["partition-id"])).to_client()


app = ServerApp()


@app.main()
def main(grid, context):
    """Run some strategies one after the other, and write down what became of them."""
    grid, found = OlderClients(grid), {}
    for strategy in (
        FedSlice(),
        BiasedLocalSGD(fast_steps=8),
        TiFL(clients_per_round=3, num_tiers=2),
    ):
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros(3)]),
            num_rounds=3,
            train_config=ConfigRecord({"lr": 0.05}),
        )
        found[type(strategy).__name__] = {
            "model": result.arrays.to_numpy_ndarrays()[0].tolist(),
            "rounds": len(result.train_metrics_clientapp),
            "evaluated": [sorted(m) for m in result.evaluate_metrics_clientapp.values()],
        }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_simulation(app, ClientApp(client_fn=client_fn, mods=[hetero]), num_supernodes=NODES)
