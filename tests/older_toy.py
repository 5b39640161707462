"""The toy task of ``toy.py`` as an app of Flower's older API: a NumPyClient."""

import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from toy import target

from flwr_hetero.mod import timing


class Client(NumPyClient):
    """Pull the model halfway to the node's target."""

    def __init__(self, partition, seen):
        self.partition = partition
        self.seen = seen

    def fit(self, parameters, config):
        w, *rest = parameters
        goal = target(self.partition)
        self.seen.append(dict(config))
        new = (w + (goal - w) / 2).astype(np.float32)
        metrics = {"train-loss": float(np.mean((w - goal) ** 2)), "device": "cpu"}
        return [new, *rest], 100, metrics | self.more(config)

    def more(self, config):
        return {"num-steps": config["num-steps"]} if "num-steps" in config else {}

    def evaluate(self, parameters, config):
        return 0.25, 10, {"eval-acc": 0.5 + 0.01 * self.partition}


def older_app(seen=None, mods=(timing,), client=Client) -> ClientApp:
    """Make a ClientApp whose node i does what that of ``toy_app`` does."""

    def client_fn(context):
        return client(int(context.node_config["partition-id"]), [] if seen is None else seen)

    return ClientApp(client_fn=lambda context: client_fn(context).to_client(), mods=list(mods))
