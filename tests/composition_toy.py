"""A toy node that follows whatever a wrapper of this package asks for."""

import numpy as np
import torch
from flwr.app import Array, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import app_of, partition_of, reply_with

from flwr_hetero import keys
from flwr_hetero.mercury.resharding import NodeShard
from flwr_hetero.mod import restore, save_state, timing
from flwr_hetero.sampler import OrderedSampler

SLOTS = 4
SAMPLE_BYTES = 8
USUAL_STEPS = 4


def num_examples(partition: int) -> int:
    return 10 * (1 + partition)


def goal(partition: int) -> float:
    """What a node descends to; no two pairs are equally far apart."""
    return 1.0 + partition + 0.1 * partition**2


def local_model(start: np.ndarray, partition: int, steps: int) -> np.ndarray:
    """Go a quarter of the way to the node's goal in each step."""
    return (goal(partition) + (start - goal(partition)) * 0.75**steps).astype(np.float32)


def composition_app(mods=()) -> ClientApp:
    """Make a ClientApp with steps, ordered units, samples to swap and statistics.

    Its model depends on nothing but the node and its steps, so that a test can predict it.
    """

    def train(message: Message, context: Context) -> Message:
        partition = partition_of(context)
        steps = int(message.content["config"].get(keys.NUM_STEPS, USUAL_STEPS))
        model = local_model(message.content["arrays"]["w"].numpy(), partition, steps)
        metrics = {
            "num-examples": num_examples(partition),
            "num-steps": steps,
            "examples-processed": 8 * steps,
            "train-loss": float(np.mean((model - goal(partition)) ** 2)),
        }
        reply = reply_with(message, metrics, {"w": Array(model)})
        reply.content[keys.SAMPLER] = ConfigRecord({"coverage": 0.5})
        _visit(message, context, reply.content, partition, steps)
        swap(message, context, reply)
        return reply

    profile = {"num-examples": 100, "num-steps": 10, "examples-processed": 80}
    return app_of(train, [*mods, timing], profile, spread=0.01)


def _visit(message, context, content, partition, steps):
    """Visit two units of data in the order that the server wants, and report on it."""
    records = message.content.config_records
    if keys.ORDER not in records:
        return
    sampler = OrderedSampler(2, 1, seed=partition)
    restore(sampler, context, "order")
    sampler.follow(records.get(keys.ORDER, {}))
    gradients = torch.tensor([[1.0, 2.0, 0.5 * partition], [-1.0, 0.3, 1.0]])
    for _ in range(steps):
        chosen, _ = sampler.next_batch()
        sampler.observe(gradients[chosen])
    save_state(context, "order", sampler.state_dict())
    content[keys.ORDER] = ConfigRecord(sampler.report())


def swap(message, context, reply):
    """Take in and offer samples of eight bytes."""
    shard = NodeShard.open(message, context)
    if shard is not None:
        slots = shard.offers(SLOTS, SAMPLE_BYTES, lambda count, _: np.arange(count))
        partition = partition_of(context)
        content = b"".join(bytes([partition, slot] * (SAMPLE_BYTES // 2)) for slot in slots)
        shard.close(reply, context, slots, content)
