"""Least squares: even partitions visit their data in the server's order, odd ones by Mercury."""

import time

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.mod import restore, save_state, timing
from flwr_hetero.sampler import MercurySampler, OrderedSampler

EXAMPLES, BATCH, DIM = 16, 2, 5

app = ClientApp(mods=[timing])


def examples(partition):
    rng = np.random.default_rng(partition)
    inputs = rng.standard_normal((EXAMPLES, DIM))
    return inputs, inputs @ np.arange(1, DIM + 1) + 0.1 * partition


@app.train()
def train(message, context):
    partition = int(context.node_config["partition-id"])
    inputs, targets = examples(partition)
    ordered = partition % 2 == 0
    if ordered:
        sampler = OrderedSampler(EXAMPLES, BATCH, seed=partition, method="cd-grab")
    else:
        sampler = MercurySampler(EXAMPLES, BATCH, seed=partition)
    known = restore(sampler, context, "sampler")
    if ordered:
        sampler.follow(message.content.config_records.get(keys.ORDER, {}))
    w = message.content["arrays"]["w"].numpy().astype(np.float64)
    steps = int(message.content["config"][keys.NUM_STEPS])
    losses = []
    for _ in range(steps):
        chosen, weights = sampler.next_batch()
        error = inputs[chosen] @ w - targets[chosen]
        step = (weights * error) @ inputs[chosen] / len(chosen)
        if ordered:
            sampler.observe(torch.from_numpy(step[None].astype(np.float32)))
        else:
            sampler.update(chosen, np.abs(error))
            group = sampler.refresh_indices()
            sampler.update(group, np.abs(inputs[group] @ w - targets[group]))
        w -= 0.05 * step
        losses.append(float(np.mean(error**2)))
        burn(context.run_config["work"] / 4)
    save_state(context, "sampler", sampler.state_dict())
    metrics = {"num-examples": EXAMPLES, "num-steps": steps, "train-loss": float(np.mean(losses))}
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w.astype(np.float32))})})
    content["metrics"] = MetricRecord(metrics)
    if ordered and (report := sampler.report()):
        content[keys.ORDER] = ConfigRecord(report)
    name = "ordered" if ordered else "mercury"
    content[keys.SAMPLER] = ConfigRecord({f"{name}.continued": float(known)})
    return Message(content, reply_to=message)


@app.train("profile")
def profile(message, context):
    burn(context.run_config["work"])
    metrics = MetricRecord({"num-examples": EXAMPLES, "num-steps": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def burn(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
