"""Each node pulls the model towards its partition number, unless a fault is injected."""

import os
import signal
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.mod import timing


def inject(message, context, call_next):
    """Inject a fault; outside the timing mod, whose record can be corrupted too."""
    kind = fault(message, context)
    if kind == "raises":
        raise RuntimeError("injected error")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        return Message(RecordDict({"much": ArrayRecord([np.ones(2**50)])}), reply_to=message)
    reply = call_next(message, context)
    if kind:
        corrupt(reply.content, kind)
    return reply


app = ClientApp(mods=[inject, timing])


@app.train()
def train(message, context):
    burn(context)
    w = message.content["arrays"]["w"].numpy()
    goal = float(context.node_config["partition-id"])
    arrays = ArrayRecord({"w": Array((w + (goal - w) / 2).astype(np.float32))})
    metrics = MetricRecord({"num-examples": 100, "train-loss": float(np.mean((w - goal) ** 2))})
    if keys.NUM_STEPS in message.content["config"]:
        metrics[keys.NUM_STEPS] = message.content["config"][keys.NUM_STEPS]
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.train("profile")
def profile(message, context):
    burn(context)
    metrics = MetricRecord({"num-examples": 100})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def burn(context):
    start = time.process_time()
    while time.process_time() - start < context.run_config["work"]:
        pass


def fault(message, context):
    if message.metadata.message_type != "train":
        return ""
    here = (context.node_config["partition-id"], message.content["config"]["server-round"])
    for word in str(context.run_config["faults"]).split():
        partition, server_round, kind = word.split(":")
        if here == (int(partition), int(server_round)):
            return kind
    return ""


def corrupt(content, kind):
    arrays = content["arrays"]
    metrics = content["metrics"]
    match kind:
        case "nan":
            arrays["w"] = Array(np.full(1000, np.nan, np.float32))
        case "shape":
            arrays["w"] = Array(np.zeros((2, 2), np.float32))
        case "missing":
            content["arrays"] = ArrayRecord()
        case "extra":
            arrays["v"] = Array(np.zeros(1, np.float32))
        case "pickle":
            arrays["w"] = Array("float32", (1000,), "numpy.ndarray", b"\x80\x04N.")
        case "metric":
            metrics["extra"] = 1.0
        case "weight":
            metrics["num-examples"] = float("inf")
        case "steps":
            metrics[keys.NUM_STEPS] = 2**62
        case "latency":
            content[keys.TIMING] = ConfigRecord({keys.TRAIN_TIME: 1e6, keys.TRANSFER_TIME: 0.0})
