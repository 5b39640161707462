"""A toy federated task in NumPy: nodes move the model towards their own mean."""

from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from flwr_hetero import keys
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


def partition_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def reply_with(message, metrics: dict, arrays: dict | None = None) -> Message:
    content = RecordDict({"metrics": MetricRecord(metrics)})
    if arrays is not None:
        content["arrays"] = ArrayRecord(arrays)
    return Message(content, reply_to=message)


def app_of(train, mods=(), profile: dict | None = None, spread=0.0) -> ClientApp:
    """Make a ClientApp; ``profile``: what it answers to that, ``spread``: of nodes' accuracies."""
    app = ClientApp(mods=list(mods))
    app.train()(train)
    if profile is not None:
        app.train("profile")(lambda message, context: reply_with(message, profile))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        accuracy = 0.5 + spread * partition_of(context)
        return reply_with(message, {"num-examples": 10, "eval-acc": accuracy})

    return app


def rewriting(change):
    """Make a mod that lets ``change(partition, message, reply)`` alter replies."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        change(partition_of(context), message, reply)
        return reply

    return mod


def altered(change, when=lambda partition, number: partition == 0):
    """Make a mod that updates the metrics of a reply when ``when(partition, round)``."""

    def update(partition, message, reply):
        if when(partition, message.content["config"].get("server-round", 0)):
            next(iter(reply.content.metric_records.values())).update(change)

    return rewriting(update)


def toy_app(*, profile: bool = True, mods=(timing,)) -> ClientApp:
    """Make a ClientApp whose node i pulls the model halfway to ``target(i)``."""

    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        goal = target(partition_of(context))
        w = arrays["w"].numpy()
        new = dict(arrays) | {"w": Array((w + (goal - w) / 2).astype(np.float32))}
        loss = float(np.mean((w - goal) ** 2))
        return reply_with(message, {"num-examples": 100, "train-loss": loss}, new)

    return app_of(train, mods, {"num-examples": 100} if profile else None, spread=0.01)


class InMemoryGrid:
    """Flower's simulation, as a strategy sees it; nodes report their time, or do not."""

    def __init__(self, grid, report=True):
        self.grid = grid
        self.report = report

    def __getattr__(self, name):
        if name == "virtual_time_s":
            raise AttributeError(name)
        return getattr(self.grid, name)

    def pull_messages(self, message_ids):
        replies = self.grid.wait_for(message_ids)
        for reply in replies if not self.report else ():
            del reply.content[keys.TIMING]
        return replies
