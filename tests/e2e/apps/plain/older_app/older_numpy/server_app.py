"""What the server does: a strategy of today over clients of the older API."""

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.older import OlderClients

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for some rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    arrays = ArrayRecord([np.zeros((64, 10))])
    result = strategy.start(OlderClients(grid), arrays, num_rounds=rounds)
    print("accuracy", result.evaluate_metrics_clientapp[rounds])
