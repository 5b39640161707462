"""The server: random selection first, then TiFL, and a page that compares the two."""

from datetime import datetime
from logging import INFO, WARNING
from math import ceil
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.exchange.nodes import is_simulated, settled_nodes
from flwr_hetero.report import RunDirectory
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import write_page
from flwr_hetero.strategy import Recorded, TiFL
from tifl_app import task

BASELINE_ROUNDS = 0.4
"""Rounds of random selection for each of TiFL's, which are several times as short."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run random selection and TiFL on the same devices."""
    config = dict(context.run_config)
    num_nodes = len(settled_nodes(grid, config["num-tiers"]))
    if num_nodes < config["num-tiers"]:
        log(WARNING, "%d nodes are too few for %d tiers.", num_nodes, config["num-tiers"])
        config["num-tiers"] = num_nodes
    tifl = make_strategy(config)
    folder = run_folder(config)
    run_dir = RunDirectory(folder, config, resume=config["resume"], argument="output-dir")
    baseline = folder / "baseline"
    # A baseline on real devices would cost their time.
    is_emulated = is_simulated(grid) and config["fleet"] != "real"
    is_first = config["policy"] != "vanilla" and not config["resume"]
    if config["baseline"] and is_emulated and is_first:
        log(INFO, "First the baseline: random selection, same seed.")
        num_rounds = ceil(BASELINE_ROUNDS * config["num-server-rounds"])
        vanilla = config | {"policy": "vanilla", "num-server-rounds": num_rounds}
        train(grid, vanilla, make_strategy(vanilla), RunDirectory(baseline, vanilla))
        log(INFO, "Now TiFL, policy %s.", config["policy"])
    train(grid, config, tifl, run_dir)
    if baseline.is_dir():
        comparison = compare(read_runs([baseline, folder]))
        page = write_page(comparison, folder / "compare.html")
        log(INFO, "%s %s", " ".join(comparison.sentences), page)


def make_strategy(config: dict) -> TiFL:
    """Make the strategy; it refuses settings that are out of range."""
    return TiFL(
        FedAvg(fraction_evaluate=0.0),
        clients_per_round=config["clients-per-round"],
        num_tiers=config["num-tiers"],
        policy=config["policy"],
        interval=config["interval"],
        seed=config["seed"],
    )


def train(grid: Grid, config: dict, strategy: TiFL, run_dir: RunDirectory) -> None:
    """Train a model from the beginning, and record the run in a folder."""
    test_set = task.load_test(config["dataset"])

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = task.make_model(test_set)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.test(model, test_set)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    torch.manual_seed(config["seed"])
    arrays = ArrayRecord(task.make_model(test_set).state_dict())
    recorded = Recorded(strategy, run_dir=run_dir, resume=config["resume"])
    recorded.start(grid, arrays, num_rounds=config["num-server-rounds"], evaluate_fn=evaluate)
    log(INFO, "Results: %s", run_dir.path / "report.html")


def run_folder(config: dict) -> Path:
    """Return the folder of this run: ``output-dir``, or a new one in the home directory."""
    new = Path.home() / "flwr-hetero-runs" / f"tifl-{datetime.now():%Y-%m-%d-%H%M%S}"
    return Path(config["output-dir"] or new).expanduser()
