"""FedSlice over clients of the older API."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_hetero.older import OlderClients
from flwr_hetero.strategy import FedSlice, Recorded

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for two rounds."""
    strategy = Recorded(FedSlice(), run_dir=context.run_config["output-dir"])
    strategy.start(OlderClients(grid), ArrayRecord([np.zeros(3)]), num_rounds=2, timeout=120.0)
