"""The server: fast nodes take more steps, and their models weigh more."""

from datetime import datetime
from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from biased_app import task
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import BiasedLocalSGD, Recorded

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run biased local SGD."""
    config = context.run_config
    resume = config["resume"]
    strategy = BiasedLocalSGD(
        FedAvg(fraction_evaluate=0.0),
        fast_steps=config["fast-steps"],
        budget=config["budget"],
        weigh_by_steps=config["weigh-by-steps"],
        step_correction=0.0,
        high_loss_fraction=config["high-loss-fraction"],
        seed=config["seed"],
    )
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
    strategy.start(grid, arrays, num_rounds=config["num-server-rounds"], evaluate_fn=evaluate)
    log(INFO, "Results: %s", run_dir.path / "report.html")


def run_folder(config: dict) -> Path:
    """Return the folder of this run: ``output-dir``, or a new one in the home directory."""
    new = Path.home() / "flwr-hetero-runs" / f"biased-local-sgd-{datetime.now():%Y-%m-%d-%H%M%S}"
    return Path(config["output-dir"] or new).expanduser()
