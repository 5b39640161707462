"""Nodes that descend to goals of their own, batch by batch; every second one takes its time."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero.mod import hetero

BATCHES, BATCH = 8, 4
LR = 0.02
"""So low that a message brings the model a seventh of the way to a node's goal: FedBuff counts the
rare updates of a slow node several times over, and must not jump past the goals with them."""
SLOW_STEP_S = 0.03
"""Seconds that a slow node sleeps a step; an emulated one has a device instead."""

app = ClientApp(mods=[hetero])


@app.train()
def train(message, context):
    """Take the steps that the server asks for, else a pass; say what was asked and taken."""
    partition, taken = partition_of(context), 0
    w = message.content["arrays"]["w"].numpy()
    for batch in hetero.batches(list(examples(partition)), message):
        w = (w - LR * (w - batch.mean())).astype(np.float32)
        taken += 1
        if partition % 2 and not context.node_config.get("emulated"):
            time.sleep(SLOW_STEP_S)
    metrics = {
        "num-examples": BATCHES * BATCH,
        "train-loss": loss(w, partition),
        "asked": int(message.content["config"].get("num-steps", BATCHES)),
        "taken": taken,
    }
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Say how far the model is from the node's goal."""
    off = loss(message.content["arrays"]["w"].numpy(), partition_of(context))
    metrics = MetricRecord({"num-examples": BATCHES * BATCH, "eval-loss": off})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def partition_of(context):
    """Return which part of the data a node has."""
    return int(context.node_config["partition-id"])


def examples(partition):
    """Draw a node's batches; shape (BATCHES, BATCH)."""
    noise = np.random.default_rng(partition).standard_normal((BATCHES, BATCH))
    return 1.0 + partition + 0.1 * noise


def loss(w, partition):
    """Return the squared distance of a model from a node's goal."""
    return float(np.mean((w - examples(partition).mean()) ** 2))
