"""The server: FedAvg, FedSlice and what else a user could take."""

import random
import time
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from flwr_hetero.exchange.nodes import settled_nodes
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import FedBuff, FedSlice, RandomSelection, Recorded, TiFL
from waiting_app import task

NODES = 20
CLASSES = 10
LOAD_S = 600.0
app = ServerApp()


def make_strategy(method: str, at_work: int, seed: int) -> Strategy:
    """Make a strategy around the user's FedAvg, with so many nodes at the same time."""
    base = FedAvg(fraction_evaluate=0.0)
    if method == "FedSlice":
        return FedSlice(base, concurrency=at_work, seed=seed)
    if method == "FedBuff":
        return FedBuff(base, concurrency=at_work, buffer_size=1, weighting="sqrt", seed=seed)
    if method == "TiFL":
        return TiFL(base, 4, num_tiers=5, seed=seed)
    return RandomSelection(base, at_work, seed=seed)


def first_arrays(config: dict[str, Any]) -> ArrayRecord:
    pixels = task.load(config["data"], "test").inputs.shape[1]
    return task.as_record(task.first_model(pixels, CLASSES, config["seed"]))


def central_evaluate(folder: str) -> Any:
    test = task.load(folder, "test")

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        _, probs = task.forward(task.as_model(arrays), test.inputs)
        return MetricRecord({"accuracy": float((probs.argmax(axis=1) == test.labels).mean())})

    return evaluate


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Let all nodes load the app and their data, then train."""
    config: dict[str, Any] = dict(context.run_config)
    nodes = settled_nodes(grid, NODES)
    queries = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    loaded = [r for r in grid.send_and_receive(queries, timeout=LOAD_S) if not r.has_error()]
    if len(loaded) < NODES:
        raise RuntimeError(f"{len(loaded)} of {NODES} nodes have loaded the app")
    seed = config["seed"]
    random.seed(seed)
    strategy = make_strategy(config["method"], config["at-work"], seed)
    run_dir = RunDirectory(config["output-dir"], config, argument="output-dir")
    evaluate = central_evaluate(config["data"])
    arrays = first_arrays(config)
    begun_s = time.monotonic()

    def should_stop(number: int, result: Result) -> bool:
        # A single measurement may be luck.
        last = [result.evaluate_metrics_serverapp.get(n) for n in (number - 1, number)]
        is_there = all(each and each["accuracy"] >= config["target-accuracy"] for each in last)
        return is_there or time.monotonic() - begun_s > config["budget-s"]

    recorded = Recorded(strategy, run_dir=run_dir)
    recorded.start(
        grid,
        arrays,
        config["num-server-rounds"],
        evaluate_fn=evaluate,
        should_stop=should_stop,
    )
