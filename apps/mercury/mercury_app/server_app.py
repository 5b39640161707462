"""The server: FedAvg with a few local steps a round, for Mercury works on the nodes alone."""

from datetime import datetime
from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded, SamplerMetrics
from mercury_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg, and record what the nodes' samplers report."""
    config = context.run_config
    resume = config["resume"]
    strategy = SamplerMetrics(FedAvg(fraction_evaluate=0.0))
    run_dir = RunDirectory(run_folder(config), config, resume=resume, argument="output-dir")
    test_set = task.load_test(config["dataset"])

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = task.make_model(test_set)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.test(model, test_set)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    torch.manual_seed(config["seed"])
    arrays = ArrayRecord(task.make_model(test_set).state_dict())
    strategy = Recorded(strategy, run_dir=run_dir, resume=resume)
    strategy.start(
        grid,
        arrays,
        num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord({"num-steps": config["local-steps"]}),
        evaluate_fn=evaluate,
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")


def run_folder(config: dict) -> Path:
    """Return the folder of this run: ``output-dir``, or a new one in the home directory."""
    new = Path.home() / "flwr-hetero-runs" / f"mercury-{datetime.now():%Y-%m-%d-%H%M%S}"
    return Path(config["output-dir"] or new).expanduser()
