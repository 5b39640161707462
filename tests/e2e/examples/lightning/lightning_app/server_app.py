"""What the server does."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lightning_app.task import Classifier

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    strategy = FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Classifier().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("accuracy", result.evaluate_metrics_clientapp[context.run_config["num-server-rounds"]])
