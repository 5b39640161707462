"""What a node does."""

import numpy as np
import xgboost
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

PARAMS = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "nthread": 1}

app = ClientApp()


def load_data(context: Context):
    """Give a node its own part of the digits: which of them are at least 5?"""
    inputs, targets = load_digits(return_X_y=True)
    first = context.node_config["partition-id"] + len(targets) // 5
    mine = np.arange(first, len(targets), context.node_config["num-partitions"])
    return inputs[mine], targets[mine] > 4


def load_trees(msg: Message):
    """Load the trees that were sent."""
    trees = xgboost.Booster(PARAMS)
    trees.load_model(bytearray(msg.content["arrays"]["0"].numpy().tobytes()))
    return trees


@app.train()
def train(msg: Message, context: Context):
    """Add a tree that fits this node's data."""
    inputs, targets = load_data(context)
    data = xgboost.DMatrix(inputs, targets)
    if msg.content["config"]["server-round"] == 1:
        trees = xgboost.train(PARAMS, data, num_boost_round=1)
    else:
        trees = load_trees(msg)
        trees.update(data, trees.num_boosted_rounds())
        trees = trees[trees.num_boosted_rounds() - 1 :]
    model = np.frombuffer(trees.save_raw("json"), np.uint8)
    metrics = MetricRecord({"num-examples": len(targets)})
    content = RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics})
    return Message(content, reply_to=msg)
