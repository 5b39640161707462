"""Train a model on a fleet in this process, with data in the order of a method."""

import logging
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.sampler.unit_gradients import batch_gradient
from flwr_hetero.strategy import CDGraB
from flwr_hetero.strategy.wrapper import Wrapper
from flwr_hetero.task import Examples, data_shape, evaluate, load_partition, load_test, make_model
from flwr_hetero.task.training import train


@dataclass(frozen=True)
class Setup:
    """One training run.

    Parameters
    ----------
    dataset, model : str
        As for the apps.
    num_examples : int
        Training examples in all, dealt evenly.
    nodes, batch_size : int
        Nodes, and examples per unit.
    lr, l2 : float
        Step size, and weight of the squared parameters / 2 in the objective.
    epochs : int
        Passes over the data.
    synchronous : bool
        One step a round, as in the paper; else a whole pass a round, as nodes train usually.
    method : str
        Of the sampler; ``cd-grab`` with ``sketch_size`` 0 is the exact one.
    sketch_size, seed : int
        Numbers per pair, and the seed of deal, model and method.
    """

    dataset: str
    model: str = "softmax"
    num_examples: int = 2048
    nodes: int = 8
    batch_size: int = 2
    lr: float = 0.1
    l2: float = 0.01
    epochs: int = 20
    synchronous: bool = True
    method: str = "cd-grab"
    sketch_size: int = 1024
    seed: int = 0

    @property
    def units(self) -> int:
        """Units of each node."""
        return self.num_examples // self.nodes // self.batch_size


@lru_cache(maxsize=2)
def examples_of(dataset: str, num_examples: int, seed: int) -> Examples:
    """Take the first examples of the shuffled training data."""
    whole = load_partition(dataset, 0, 1, seed=seed)
    return Examples(whole.inputs[:num_examples], whole.targets[:num_examples])


def client_app(setup: Setup) -> ClientApp:
    """Make nodes that keep model, data and order in memory: they live in this process."""
    app, samplers, parts = ClientApp(), {}, {}
    model = make_model(setup.model, *data_shape(setup.dataset))
    whole = examples_of(setup.dataset, setup.num_examples, setup.seed)
    for i, rows in enumerate(np.array_split(np.arange(setup.num_examples), setup.nodes)):
        parts[i] = Examples(whole.inputs[rows], whole.targets[rows])
        seed = 1000 * setup.seed + i
        samplers[i] = OrderedSampler(
            len(rows), setup.batch_size, seed=seed, method=setup.method, num_units=setup.units
        )

    @app.train()
    def take_steps(message: Message, context: Context) -> Message:
        partition = int(context.node_config[keys.PARTITION_ID])
        sampler, examples = samplers[partition], parts[partition]
        sampler.follow(message.content.config_records.get(keys.ORDER, {}))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())

        def watch(*_: Any) -> None:
            if sampler.watching:
                sampler.observe(batch_gradient(model))

        result = train(
            model,
            examples,
            sampler,
            num_steps=1 if setup.synchronous else len(sampler),
            lr=setup.lr,
            weight_decay=setup.l2,
            on_batch=watch,
        )
        content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
        content["metrics"] = MetricRecord({"num-examples": len(examples), "loss": result.loss})
        if report := sampler.report():
            content[keys.ORDER] = ConfigRecord(report)
        return Message(content, reply_to=message)

    return app


def run(setup: Setup) -> dict[str, Any]:
    """Train, and return the setting with loss, accuracy and bytes after each epoch."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    per_epoch = setup.units if setup.synchronous else 1
    train_set = examples_of(setup.dataset, setup.num_examples, setup.seed)
    shape = data_shape(setup.dataset)
    model = make_model(setup.model, *shape, seed=setup.seed)
    curve: dict[str, list[float]] = {"loss": [], "accuracy": []}

    def measure(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % per_epoch:
            return None
        model.load_state_dict(arrays.to_torch_state_dict())
        squares = sum(float(p.detach().square().sum()) for p in model.parameters())
        curve["loss"].append(evaluate(model, train_set)[0] + setup.l2 / 2 * squares)
        curve["accuracy"].append(evaluate(model, load_test(setup.dataset))[1])
        return None

    strategy: Wrapper = Wrapper(FedAvg(fraction_evaluate=0.0))
    if setup.method == "cd-grab":
        mode = "sketched" if setup.sketch_size else "exact"
        inner = FedAvg(fraction_evaluate=0.0)
        strategy = CDGraB(inner, mode=mode, sketch_size=setup.sketch_size or 1, seed=setup.seed)
    rounds: list[dict[str, Any]] = []
    strategy.on_round_end = lambda _, record: rounds.append(record)  # type: ignore[method-assign]
    grid = LocalGrid(client_app(setup), profiles=[DeviceProfile()] * setup.nodes, seed=0)
    arrays = ArrayRecord(make_model(setup.model, *shape, seed=setup.seed).state_dict())
    strategy.start(grid, arrays, per_epoch * setup.epochs, evaluate_fn=measure)
    total = sum(record["bytes_up"] + record["bytes_down"] for record in rounds)
    extra = [record.get("cd-grab", {}) for record in rounds]
    order = sum(facts.get("bytes-up", 0) + facts.get("bytes-down", 0) for facts in extra)
    return asdict(setup) | {
        "dataset": setup.dataset.rstrip("/").rsplit("/", 1)[-1],
        "dim": sum(p.numel() for p in model.parameters()),
        "failures": sum(len(record["failures"]) for record in rounds),
        "model-bytes": total - order,
        "order-bytes": order,
        **{key: [float(f"{value:.6g}") for value in values] for key, values in curve.items()},
    }


def optimum(setup: Setup) -> float:
    """Find the least value of the objective for a convex model."""
    train_set = examples_of(setup.dataset, setup.num_examples, setup.seed)
    model = make_model(setup.model, *data_shape(setup.dataset), seed=0).double()
    inputs, params = train_set.inputs.double(), list(model.parameters())
    optimizer = torch.optim.LBFGS(
        params,
        max_iter=2000,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in params)
        value = torch.nn.functional.cross_entropy(model(inputs), train_set.targets)
        value = value + setup.l2 / 2 * squares
        value.backward()
        return value

    optimizer.step(objective)
    return float(objective().detach())
