"""A toy federated task with ordered data: least squares, gradients by hand, any float type."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.cd_grab.sampler import HerdingProbe, OrderedSampler
from flwr_hetero.mod import load_state, save_state, timing

DIM, BATCH = 5, 2


def examples(partition: int, size: int, loud: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Draw a node's inputs (size, DIM) and targets (size,); those of one may be far off."""
    rng = np.random.default_rng([7, partition])
    inputs = rng.standard_normal((size, DIM))
    targets = inputs @ np.arange(1, DIM + 1) + rng.standard_normal(size) + partition
    return inputs, targets * (30.0 if partition == loud else 1.0)


def gradient(w, inputs, targets, weights) -> np.ndarray:
    """Gradient of the weighted mean of squared errors / 2."""
    return (weights * (inputs @ w - targets)) @ inputs / len(targets)


def order_app(
    sizes, *, lr=0.02, method="cd-grab", passes=1, ordered=lambda partition: True, loud=-1, mods=()
) -> ClientApp:
    """Make a ClientApp whose node i visits ``sizes[i]`` examples in batches of about BATCH.

    Its model has one array ``w``. ``ordered``: which partitions have an OrderedSampler;
    ``loud``: the partition with targets 30 times as large.
    """
    app = ClientApp(mods=[*mods, timing])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        inputs, targets = examples(partition, sizes[partition], loud)
        records = message.content.config_records
        sampler = OrderedSampler(len(targets), BATCH, seed=partition, method=method)
        if state := load_state(context, "order"):
            sampler.load_state_dict(state)
        probe = HerdingProbe(records.get(keys.HERDING, {}))
        sampler.follow(records.get(keys.ORDER, {}))
        w = message.content["arrays"]["w"].numpy()
        steps = int(records["config"].get(keys.NUM_STEPS, round(passes * len(sampler))))
        visited = []
        for _ in range(steps):
            chosen, weights = sampler.next_batch()
            step = gradient(w, inputs[chosen], targets[chosen], weights).astype(w.dtype)
            sampler.observe(torch.from_numpy(step[None]))
            probe.see(torch.from_numpy(step[None]))
            w = w - w.dtype.type(lr) * step
            visited.append(int(sampler.walk.order[sampler.walk.position - 1]))
        save_state(context, "order", sampler.state_dict())
        context.state["visited"] = ConfigRecord({"units": visited})
        metrics = {"num-examples": len(targets), "num-steps": steps, "loss": 0.0}
        metrics["examples-processed"] = steps * BATCH
        content = RecordDict({"arrays": ArrayRecord({"w": Array(w)})})
        content["metrics"] = MetricRecord(metrics)
        report = sampler.report()
        if report and ordered(partition):
            content[keys.ORDER] = ConfigRecord(report)
        if probe.on:
            content[keys.HERDING] = ConfigRecord(probe.report(len(sampler.units)))
        return Message(content, reply_to=message)

    @app.train("profile")
    def profile(message: Message, context: Context) -> Message:
        content = RecordDict({"metrics": MetricRecord({"num-examples": 10})})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "eval-acc": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def order_arrays(dtype=np.float32) -> ArrayRecord:
    """Make the model."""
    return ArrayRecord({"w": Array(np.zeros(DIM, dtype))})


def visited(grid, node_id) -> list[int]:
    """Read which units a node visited in its last round."""
    return list(grid.context(node_id).state["visited"]["units"])
