"""One run in Flower's own simulation: ``app.py JSON`` prints accuracy and seconds by round.

The ClientApp is written as in Flower's quickstart for PyTorch; the devices are not emulated.
"""

import json
import sys
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.mod import hetero
from flwr_hetero.strategy import FedSlice
from flwr_hetero_studies import tasks

BATCH = 32
OPTIMIZERS = {
    "SGD": lambda weights, rate: torch.optim.SGD(weights, rate),
    "momentum": lambda weights, rate: torch.optim.SGD(weights, rate, momentum=0.9),
    "Adam": lambda weights, rate: torch.optim.Adam(weights, rate),
}
STRATEGIES = {"FedAvg": lambda: FedAvg(fraction_evaluate=0.0),
              "FedSlice": lambda: FedSlice(FedAvg(fraction_evaluate=0.0))}  # fmt: skip

client = ClientApp(mods=[hetero])


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch."""
    torch.set_num_threads(1)
    config: Any = message.content["config"]
    part = tasks.load_partition(
        config["dataset"],
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        partition=config["partition"],
        alpha=config["alpha"],
        seed=config["seed"],
    )
    state = message.content.array_records["arrays"].to_torch_state_dict()
    model = tasks.model_from(state, config["model"], *tasks.data_shape(config["dataset"]))
    optimizer = OPTIMIZERS[config["optimizer"]](model.parameters(), config["rate"])
    loader: Any = DataLoader(TensorDataset(part.inputs, part.targets), BATCH, shuffle=True)
    loader = hetero.batches(loader, message)
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    metrics = {"num-examples": len(part), "train-loss": total / len(loader)}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


def simulate(case: dict[str, Any]) -> dict[str, list[float]]:
    """Run a case and return its curve."""
    server = ServerApp()
    accuracy: list[float] = []
    seconds: list[float] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        settings = tasks.Settings(
            dataset=case["dataset"],
            model=case["model"],
            seed=case["seed"],
            learning_rate=case["rate"],
        )
        measure = tasks.central_evaluate(settings)
        began = time.perf_counter()

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            seconds.append(round(time.perf_counter() - began, 2))
            found = measure(server_round, arrays)
            accuracy.append(round(float(str(found["accuracy"])), 4))
            return found

        STRATEGIES[case["name"]]().start(
            grid,
            tasks.initial_arrays(settings),
            case["rounds"],
            train_config=ConfigRecord({key: case[key] for key in SENT}),
            evaluate_fn=evaluate_fn,
        )

    torch.manual_seed(case["seed"])
    resources = {
        "init_args": {"num_cpus": case["workers"]},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, case["nodes"], backend_config=resources)
    return {"accuracy": accuracy, "seconds": seconds}


SENT = ("model", "dataset", "partition", "alpha", "seed", "optimizer", "rate")
"""What clients are sent of a case."""

if __name__ == "__main__":
    print(json.dumps(simulate(json.loads(sys.argv[1]))))
