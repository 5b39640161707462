"""The node: train, and wait in each step until its device would have taken it."""

import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero.client.device import compute_time_s, named_fleet
from flwr_hetero.mod import hetero, preload
from waiting_app import task

app = ClientApp(mods=[hetero])


@preload
def open_part(context: Context) -> task.Images:
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
    model = task.as_model(msg.content["arrays"])
    seed = [int(config["seed"]), partition, int(msg.content["config"]["server-round"])]
    loader = hetero.batches(task.Batches(examples, int(config["batch-size"]), seed), msg)
    losses = []
    due_s = time.monotonic()
    for batch in loader:
        losses.append(task.step(model, batch, float(config["learning-rate"])))
        due_s += len(batch.labels) * example_s
        ahead_s = due_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
    metrics = MetricRecord({"train-loss": sum(losses) / len(losses)})
    metrics["num-examples"] = len(examples.labels)
    content = RecordDict({"arrays": task.as_record(model), "metrics": metrics})
    return Message(content, reply_to=msg)
