"""Train through Flower's messages: CDGraB and its baselines on an emulated fleet in this process.

Either one step a round, as in the paper (``parallel.py`` does the same without messages, and
``check`` says how far the two are apart), or a pass a round, as nodes train usually; with all
nodes or some, and with replies that get lost.
Usage, from the top folder: ``python -m benchmarks.cd_grab.training ../shared/data/fashion_mnist``;
appends to ``local_grid.jsonl`` a line per run that is not there yet.
"""

import argparse
import json
import logging
import random
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.cd_grab.parallel import Setup, examples_of, optimum, test_of
from benchmarks.cd_grab.parallel import run as run_parallel
from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.strategy import CDGraB
from flwr_hetero.task import Examples, data_shape, evaluate, make_model
from flwr_hetero.task.training import train

HERE = Path(__file__).parent


@dataclass(frozen=True)
class FleetSetup(Setup):
    """One training run on a fleet.

    Parameters
    ----------
    synchronous : bool
        One step a round, as in the paper; else a whole pass a round.
    fraction : float
        Part of the nodes that train in a round, drawn anew each time.
    lost : float
        Part of the replies that never arrive, models and pairs.
    """

    num_examples: int = 1024
    epochs: int = 12
    synchronous: bool = False
    fraction: float = 1.0
    lost: float = 0.0


def client_app(setup: FleetSetup) -> ClientApp:
    """Make nodes that keep model, data and order in memory: they live in this process."""
    app, samplers, parts = ClientApp(), {}, {}
    luck = np.random.default_rng([setup.seed, 9])
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

        def watch(*_: Any) -> None:  # the step's gradient is there
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
        if luck.random() < setup.lost:
            raise ConnectionError("reply lost, on purpose")
        content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
        content["metrics"] = MetricRecord({"num-examples": len(examples), "loss": result.loss})
        if report := sampler.report():
            content[keys.ORDER] = ConfigRecord(report)
        return Message(content, reply_to=message)

    return app


def run(setup: FleetSetup) -> dict[str, Any]:
    """Train, and return the setting with loss, accuracy and bytes after each epoch."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    random.seed(setup.seed)  # Flower draws the nodes of a round from it
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
        curve["accuracy"].append(evaluate(model, test_of(setup.dataset))[1])
        return None

    inner = FedAvg(fraction_train=setup.fraction, fraction_evaluate=0.0, min_train_nodes=1)
    strategy: Wrapper = Wrapper(inner)
    if setup.method == "cd-grab":
        mode = "sketched" if setup.sketch_size else "exact"
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


CASES: dict[str, dict[str, Any]] = {
    "8 nodes, a pass a round": {},
    "16 nodes, 30 % a round": {"nodes": 16, "batch_size": 2, "fraction": 0.3, "epochs": 24},
    "16 nodes, 30 % a round, 20 % lost": {
        "nodes": 16,
        "batch_size": 2,
        "fraction": 0.3,
        "lost": 0.2,
        "epochs": 24,
    },
}
METHODS = {
    "d-rr": {"method": "d-rr"},
    "id-grab": {"method": "id-grab"},
    "cd-grab": {"method": "cd-grab"},
}


def check(dataset: str) -> dict[str, Any]:
    """Compare the losses of exact CD-GraB with and without messages, three passes."""
    setup = FleetSetup(dataset, num_examples=512, epochs=3, sketch_size=0, synchronous=True)
    through_flower = run(setup)
    own = {field.name: getattr(setup, field.name) for field in fields(Setup)}
    alone = run_parallel(Setup(**own))
    apart = np.abs(np.subtract(through_flower["loss"], alone["loss"])).max()
    return {
        "case": "check",
        "loss": through_flower["loss"],
        "loss-parallel": alone["loss"],
        "apart": float(f"{apart:.2g}"),
        "order-bytes": through_flower["order-bytes"],
        "model-bytes": through_flower["model-bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "local_grid.jsonl")
    options = parser.parse_args()

    def append(line: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line["case"], line.get("method", ""), line["loss"][-1], flush=True)

    there = options.out.read_text().splitlines() if options.out.exists() else []
    known = {(x["case"], x.get("method"), x.get("seed")) for x in map(json.loads, there)}
    if ("check", None, None) not in known:
        append(check(options.dataset))
    for seed in options.seeds:
        for case in options.cases:
            base = replace(FleetSetup(options.dataset, seed=seed), **CASES[case])
            least = None
            for method, settings in METHODS.items():
                if (case, method, seed) not in known:
                    setup = replace(base, **settings)
                    least = optimum(setup) if least is None else least
                    append({"case": case, "optimum": least, **run(setup)})


if __name__ == "__main__":
    main()
