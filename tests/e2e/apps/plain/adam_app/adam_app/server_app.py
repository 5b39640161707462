"""What the server does."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from adam_app.model import Net

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for some rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=rounds
    )
    print("accuracy", result.evaluate_metrics_clientapp[rounds])
