"""What the server does."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    strategy = FedXgbBagging()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.frombuffer(b"", np.uint8)]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("accuracy", result.evaluate_metrics_clientapp[context.run_config["num-server-rounds"]])
