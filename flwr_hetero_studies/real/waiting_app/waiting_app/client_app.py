"""The node: train, and wait in each step until its device would have taken it."""

import time

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero.client.device import compute_time_s, named_fleet
from flwr_hetero.mod import hetero, preload
from flwr_hetero_studies.race.network import Labelled, descend, network_of, record_of
from waiting_app import task

app = ClientApp(mods=[hetero])


@preload
def open_part(context: Context) -> Labelled:
    """Read the node's examples; a warm node does so once per run."""
    return task.load(str(context.run_config["data"]), str(context.node_config["partition-id"]))


@app.query()
def load(msg: Message, context: Context) -> Message:
    """Load what a message needs, before the run's clock starts."""
    open_part(context)
    return Message(RecordDict(), reply_to=msg)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train at the pace of the node's device."""
    config = context.run_config
    partition = int(context.node_config["partition-id"])
    example_s = 0.0
    if config["pace"]:
        devices = named_fleet(str(config["pace"]), int(context.node_config["num-partitions"]))
        example_s = compute_time_s(devices[partition], 1.0)
    examples = open_part(context)
    net = network_of(msg.content["arrays"])
    seed = [int(config["seed"]), partition, int(msg.content["config"]["server-round"])]
    loader = hetero.batches(task.Batches(examples, int(config["batch-size"]), seed), msg)
    losses = []
    due_s = time.monotonic()
    for batch in loader:
        losses.append(descend(net, batch, float(config["learning-rate"])).mean())
        due_s += len(batch) * example_s
        ahead_s = due_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
    metrics = MetricRecord({"train-loss": float(np.mean(losses)), "num-examples": len(examples)})
    content = RecordDict({"arrays": record_of(net), "metrics": metrics})
    return Message(content, reply_to=msg)
