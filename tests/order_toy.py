"""A toy federated task with ordered data: least squares, gradients by hand, any float type."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import app_of, partition_of, reply_with

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import restore, save_state, timing
from flwr_hetero.sampler import OrderedSampler

DIM = 5
BATCH = 2


def examples(partition: int, size: int, outlier: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Draw a node's inputs (size, DIM) and targets (size,); those of one may be far off."""
    rng = np.random.default_rng([7, partition])
    inputs = rng.standard_normal((size, DIM))
    targets = inputs @ np.arange(1, DIM + 1) + rng.standard_normal(size) + partition
    return inputs, targets * (30.0 if partition == outlier else 1.0)


def gradient(w, inputs, targets, weights) -> np.ndarray:
    """Of the weighted mean of squared errors / 2."""
    return (weights * (inputs @ w - targets)) @ inputs / len(targets)


def order_app(
    sizes, *, lr=0.02, method="cd-grab", passes=1, ordered=lambda i: True, outlier=-1, mods=()
) -> ClientApp:
    """Make a ClientApp whose node i visits ``sizes[i]`` examples in batches of about BATCH.

    Its model has one array ``w``. ``ordered``: which partitions have an OrderedSampler;
    ``outlier``: the partition with targets 30 times as large.
    """

    def train(message: Message, context: Context) -> Message:
        partition = partition_of(context)
        inputs, targets = examples(partition, sizes[partition], outlier)
        records = message.content.config_records
        sampler = OrderedSampler(len(targets), BATCH, seed=partition, method=method)
        restore(sampler, context, "order")
        sampler.follow(records.get(keys.ORDER, {}))
        w = message.content["arrays"]["w"].numpy()
        steps = int(records["config"].get(keys.NUM_STEPS, round(passes * len(sampler))))
        visited = []
        for _ in range(steps):
            chosen, weights = sampler.next_batch()
            step = gradient(w, inputs[chosen], targets[chosen], weights).astype(w.dtype)
            sampler.observe(torch.from_numpy(step[None]))
            w = w - w.dtype.type(lr) * step
            visited.append(int(sampler.node_order.order[sampler.node_order.position - 1]))
        save_state(context, "order", sampler.state_dict())
        context.state["visited"] = ConfigRecord({"units": visited})
        metrics = {"num-examples": len(targets), "num-steps": steps, "loss": 0.0}
        metrics["examples-processed"] = steps * BATCH
        reply = reply_with(message, metrics, {"w": Array(w)})
        report = sampler.report()
        if report and ordered(partition):
            reply.content[keys.ORDER] = ConfigRecord(report)
        return reply

    return app_of(train, [*mods, timing], {"num-examples": 10})


def order_arrays(dtype=np.float32) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(DIM, dtype))})


def visited(grid, node_id) -> list[int]:
    """Which units a node visited in its last round."""
    return list(grid.context(node_id).state["visited"]["units"])


NO_EVALUATION = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


def fedavg():
    return FedAvg(**NO_EVALUATION)


def grid_of(sizes, *, profiles=None, faults=(), **options):
    """Make a fleet whose node i has ``sizes[i]`` examples; options of ``order_app``."""
    profiles = profiles or [DeviceProfile()] * len(sizes)
    return LocalGrid(order_app(sizes, **options), profiles=profiles, seed=0, faults=faults)


class Rounds(History):
    """A run that has ended."""

    def __init__(
        self, strategy, grid, num_rounds, dtype=np.float32, look=lambda r: None, **options
    ):
        super().__init__(strategy)
        self.look = look
        self.result = self.start(grid, order_arrays(dtype), num_rounds=num_rounds, **options)

    def on_round_end(self, run, record):
        super().on_round_end(run, record)
        self.look(record["round"])

    def of(self, wrapper, key):
        """What a wrapper said in each round."""
        return [record.get(wrapper, {}).get(key) for record in self.records if record["round"]]

    def reasons(self):
        """Why replies were dropped."""
        return [failure["reason"] for record in self.records for failure in record["failures"]]
