"""What the server does."""

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for some rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    result = strategy.start(grid, ArrayRecord([np.zeros(5)]), num_rounds=rounds)
    print("accuracy", result.evaluate_metrics_clientapp[rounds])
