"""Training with every order: the paper's synchronous steps, and through Flower's messages.

The synchronous steps leave only Flower out, which makes thousands of one-step rounds affordable.
Orders do not depend on when pairs are reported, so a node reports a whole pass at once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy

from benchmarks.bench import Options, Run
from benchmarks.cd_grab.nodes import (
    METHODS,
    SERVED,
    Nodes,
    UnitGradients,
    examples_of,
    fill,
    fits,
    flat,
)
from benchmarks.tables import Case
from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import relative_herding
from flwr_hetero.cd_grab.gradients import batch_gradient, sketch_gradients
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import CDGraB, Wrapper
from flwr_hetero.task import Examples, data_shape, evaluate, load_test, make_model, train

PROBE = 256
"""Numbers in the sketches from which the herding bound of a pass is taken."""
LAST = 5
"""Epochs at the end in which the herding bound is taken."""
SOFTMAX = {"model": "softmax", "num_examples": 4096, "nodes": 8, "batch_size": 4, "lr": 0.03,
           "l2": 0.01, "epochs": 20}  # fmt: skip
LENET = SOFTMAX | {"model": "lenet", "num_examples": 1024, "lr": 0.05, "l2": 0.0, "epochs": 12}
SMALL, LARGE = {"nodes": 4, "batch_size": 8}, {"nodes": 64, "batch_size": 1}
KEY = ("D-RR", "CD-GraB, k = 1024", "ID-GraB(PairBal)", "CD-GraB, exact")
ALL = (*KEY, "ID-GraB(Bal)", "shuffle once", "CD-GraB, k = 256", "CD-GraB, k = 64")
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "softmax, 8 nodes": (SOFTMAX, ALL),
    "softmax, 64 nodes": (SOFTMAX | LARGE, ALL[:5]),
    "softmax, 4 nodes": (SOFTMAX | SMALL, KEY),
    "lenet, 8 nodes": (LENET, KEY[:3]),
    "lenet, 64 nodes": (LENET | LARGE, KEY[:3]),
    "lenet, 4 nodes": (LENET | SMALL, KEY[:3]),
    "softmax, 8 nodes, smaller step": (SOFTMAX | {"lr": 0.01}, KEY),
}
MESSAGES = SOFTMAX | {"num_examples": 1024, "epochs": 12, "synchronous": False, "fraction": 1.0,
                      "lost": 0.0}  # fmt: skip
SOME = MESSAGES | {"nodes": 16, "batch_size": 2, "fraction": 0.3, "epochs": 24}
THROUGH_FLOWER: dict[str, Case] = {
    "8 nodes, a pass a round": MESSAGES,
    "16 nodes, 30 % a round": SOME,
    "16 nodes, 30 % a round, 20 % lost": SOME | {"lost": 0.2},
}
CHECK = "with and without messages"


def plan(options: Options) -> Iterator[Run]:
    """Yield all runs; ``epochs`` of the settings is the most."""
    common = {"data": options.data}
    most = options.settings["epochs"]

    def short(settings: Case) -> Case:
        return common | settings | {"epochs": min(settings["epochs"], most)}

    for seed in options.seeds_or(range(3)):
        for experiment, (settings, methods) in CASES.items():
            for name in methods if fits(settings["model"], options.data) else ():
                yield Run({"experiment": experiment, "name": name, **short(settings)}, seed)
        for count in (4096, 1024):
            case = {"experiment": "optimum", "name": f"softmax, {count} examples"}
            yield Run(case | common | {"num_examples": count, "l2": SOFTMAX["l2"]}, seed)
        for experiment, settings in THROUGH_FLOWER.items():
            for name in KEY[:3]:
                yield Run({"experiment": experiment, "name": name, **short(settings)}, seed)
    case = MESSAGES | {"num_examples": 512, "epochs": 3, "synchronous": True}
    yield Run({"experiment": CHECK, "name": "CD-GraB, exact", **short(case)})


def run(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    """Run one case."""
    available = len(examples_of(dataset, case["num_examples"], seed))
    case = case | {"num_examples": available}
    if case["experiment"] == "optimum":
        return {"metrics": {"value": optimum(case, seed, dataset)}}
    if case["experiment"] in CASES:
        return synchronous(case, seed, dataset)
    found = through_flower(case, seed, dataset)
    if case["experiment"] == CHECK:
        alone = synchronous(case, seed, dataset)["curve"]["loss"]
        apart = np.abs(np.subtract(found["curve"]["loss"], alone)).max()
        return {"metrics": {"apart": float(f"{apart:.2g}")}, "curve": found["curve"]}
    return found | {"metrics": found["metrics"] | {"optimum": optimum(case, seed, dataset)}}


class Measure:
    """Loss on the training data with the penalty, and accuracy on the first test images."""

    def __init__(self, case: Case, seed: int, dataset: str) -> None:
        self.train_set = examples_of(dataset, case["num_examples"], seed)
        test = load_test(dataset)
        self.test_set = Examples(test.inputs[:2000], test.targets[:2000])
        self.l2, self.curve = case["l2"], {"loss": [], "accuracy": []}

    def __call__(self, model: torch.nn.Module) -> None:
        """Add a point to the curve."""
        squares = sum(float(p.detach().square().sum()) for p in model.parameters())
        loss = evaluate(model, self.train_set, 2048)[0] + self.l2 / 2 * squares
        accuracy = evaluate(model, self.test_set, 2048)[1]
        for key, value in (("loss", loss), ("accuracy", accuracy)):
            self.curve[key].append(float(f"{value:.6g}"))


def units_of(case: Case) -> int:
    return case["num_examples"] // case["nodes"] // case["batch_size"]


def synchronous(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    """Train one step of all nodes at a time."""
    model = make_model(case["model"], *data_shape(dataset), seed=seed)
    gradients_of, params, measure = UnitGradients(model), flat(model), Measure(case, seed, dataset)
    num_nodes, units, epochs = case["nodes"], units_of(case), case["epochs"]
    per_node = units * case["batch_size"]
    rows = np.arange(num_nodes * per_node).reshape(num_nodes, per_node)
    inputs, targets = measure.train_set.inputs[rows], measure.train_set.targets[rows]
    nodes = Nodes([per_node] * num_nodes, case["batch_size"], case["name"], seed)
    node, herding = torch.arange(num_nodes)[:, None], []
    measure(fill(model, params))
    for epoch in range(epochs):
        seen = np.empty((units, num_nodes, PROBE), np.float32)
        nodes.begin(epoch)
        for step in range(units):
            drawn = torch.from_numpy(np.array([s.next_batch()[0] for s in nodes.samplers]))
            gradients = gradients_of(params, inputs[node, drawn], targets[node, drawn])
            for sampler, gradient in zip(nodes.samplers, gradients, strict=True):
                sampler.observe(gradient[None])
            if epoch >= epochs - LAST:
                seen[step] = sketch_gradients(gradients, PROBE, 7)
            params = params - case["lr"] * (gradients.mean(dim=0) + case["l2"] * params)
        nodes.server.receive(nodes.reports().values())
        if epoch >= epochs - LAST:
            herding.append(float(f"{relative_herding(list(seen.swapaxes(0, 1))):.6g}"))
        measure(fill(model, params))
    exchanged = 8 * len(params) * num_nodes * units * epochs
    figures = {"dim": len(params), "model_bytes": exchanged, "order_bytes": nodes.order_bytes}
    figures |= {"herding": float(np.mean(herding)), "loss": measure.curve["loss"][-1]}
    return {"metrics": figures, "curve": measure.curve}


def optimum(case: Case, seed: int, dataset: str) -> float:
    """Find the least value of the objective for softmax regression."""
    train_set = examples_of(dataset, case["num_examples"], seed)
    model = make_model("softmax", *data_shape(dataset), seed=0).double()
    inputs, params = train_set.inputs.double(), list(model.parameters())
    optimizer = torch.optim.LBFGS(
        params, max_iter=300, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in params)
        value = cross_entropy(model(inputs), train_set.targets) + case["l2"] / 2 * squares
        value.backward()
        return value

    optimizer.step(objective)
    return float(objective().detach())


# --- through Flower's messages --------------------------------------------------------------


def client_app(case: Case, seed: int, dataset: str) -> ClientApp:
    """Make nodes that keep data and order in memory: they live in this process."""
    app, draws = ClientApp(), np.random.default_rng([seed, 9])
    model = make_model(case["model"], *data_shape(dataset))
    whole = examples_of(dataset, case["num_examples"], seed)
    split = np.array_split(np.arange(case["num_examples"]), case["nodes"])
    parts = [Examples(whole.inputs[rows], whole.targets[rows]) for rows in split]
    nodes = Nodes([len(rows) for rows in split], case["batch_size"], case["name"], seed)

    @app.train()
    def take_steps(message: Message, context: Context) -> Message:
        partition = int(context.node_config[keys.PARTITION_ID])
        sampler, examples = nodes.samplers[partition], parts[partition]
        sampler.follow(message.content.config_records.get(keys.ORDER, {}))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())

        def watch(*_: Any) -> None:  # the step's gradient is there
            if sampler.watching:
                sampler.observe(batch_gradient(model))

        steps = 1 if case["synchronous"] else len(sampler)
        decay = {"lr": case["lr"], "weight_decay": case["l2"]}
        result = train(model, examples, sampler, num_steps=steps, on_batch=watch, **decay)
        if draws.random() < case["lost"]:
            raise ConnectionError("reply lost, on purpose")
        content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
        content["metrics"] = MetricRecord({"num-examples": len(examples), "loss": result.loss})
        if report := sampler.report():
            content[keys.ORDER] = ConfigRecord(report)
        return Message(content, reply_to=message)

    return app


def through_flower(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    """Train on an emulated fleet: one step a round, or a pass a round, with all nodes or some."""
    per_epoch = units_of(case) if case["synchronous"] else 1
    model, measure = (
        make_model(case["model"], *data_shape(dataset), seed=seed),
        Measure(case, seed, dataset),
    )
    first = ArrayRecord({key: value.clone() for key, value in model.state_dict().items()})

    def after_round(server_round: int, arrays: ArrayRecord) -> None:
        if server_round % per_epoch == 0:
            model.load_state_dict(arrays.to_torch_state_dict())
            measure(model)

    inner = FedAvg(fraction_train=case["fraction"], fraction_evaluate=0.0, min_train_nodes=1)
    strategy: Wrapper = Wrapper(inner)
    method, size = METHODS[case["name"]]
    if method == SERVED:
        mode = "sketched" if size else "exact"
        strategy = CDGraB(inner, mode=mode, sketch_size=size or 1, seed=seed)
    rounds: list[dict[str, Any]] = []
    strategy.on_round_end = lambda _, record: rounds.append(record)  # type: ignore[method-assign]
    grid = LocalGrid(client_app(case, seed, dataset), [DeviceProfile()] * case["nodes"], seed=0)
    strategy.start(grid, first, per_epoch * case["epochs"], evaluate_fn=after_round)
    total = sum(record["bytes_up"] + record["bytes_down"] for record in rounds)
    extra = [record.get("cd-grab", {}) for record in rounds]
    order = sum(info.get("bytes-up", 0) + info.get("bytes-down", 0) for info in extra)
    figures = {"model_bytes": total - order, "order_bytes": order}
    figures["failures"] = sum(len(record["failures"]) for record in rounds)
    return {"metrics": figures | {"loss": measure.curve["loss"][-1]}, "curve": measure.curve}
