"""A toy federated task in NumPy: nodes move the model towards their own mean."""

from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from flwr_hetero.mod import timing

FLOWER_STRATEGIES = {
    "FedAvg": flower.FedAvg,
    "FedAdagrad": flower.FedAdagrad,
    "FedAdam": flower.FedAdam,
    "FedYogi": flower.FedYogi,
    "FedAvgM": partial(flower.FedAvgM, server_momentum=0.9),
    "FedProx": partial(flower.FedProx, proximal_mu=0.1),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": flower.FedTrimmedAvg,
    "Krum": flower.Krum,
    "MultiKrum": partial(flower.MultiKrum, num_nodes_to_select=2),
    "Bulyan": flower.Bulyan,
    "QFedAvg": partial(flower.QFedAvg, 0.1, train_loss_key="train-loss"),
}


def toy_arrays(size: int = 4, *, buffer: bool = True) -> ArrayRecord:
    """Make a model of one float array and, if wanted, one integer buffer."""
    arrays = {"w": Array(np.zeros(size, np.float32))}
    return ArrayRecord(arrays | {"n": Array(np.array(1))} if buffer else arrays)


def target(partition: int) -> float:
    """Give what node ``partition`` pulls the model to; no two pairs are equally far apart."""
    return partition + 0.01 * partition**2


def toy_app(*, profile: bool = True, mods=(timing,)) -> ClientApp:
    """Make a ClientApp whose node i pulls the model halfway to ``target(i)``."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        goal = target(_partition(context))
        w = arrays["w"].numpy()
        new = ArrayRecord(dict(arrays) | {"w": Array((w + (goal - w) / 2).astype(np.float32))})
        metrics = MetricRecord({"num-examples": 100, "train-loss": float(np.mean((w - goal) ** 2))})
        return Message(RecordDict({"arrays": new, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "eval-acc": 0.5 + 0.01 * _partition(context)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    if profile:

        @app.train("profile")
        def report(message: Message, context: Context) -> Message:
            metrics = MetricRecord({"num-examples": 100})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])
