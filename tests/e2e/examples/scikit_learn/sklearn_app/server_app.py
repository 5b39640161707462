"""What the server does."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    strategy = FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros((10, 64)), np.zeros(10)]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("accuracy", result.evaluate_metrics_clientapp[context.run_config["num-server-rounds"]])
