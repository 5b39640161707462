"""A toy federated task with local steps: nodes descend to their own goal, one step at a time."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import app_of, partition_of, reply_with

LR = 0.25
BATCH = 8


def goal(partition: int) -> float:
    return 1.0 + partition


def local_model(start: np.ndarray, partition: int, steps: int) -> np.ndarray:
    """Take gradient steps on (w - goal)^2 / 2."""
    for _ in range(steps):
        start = (start - LR * (start - goal(partition))).astype(np.float32)
    return start


def steps_app(claims=None, num_examples=None, seen=None, mods=(), silent=()) -> ClientApp:
    """Make a ClientApp that takes ``num-steps`` steps.

    ``claims``: partition to what it says instead of its steps; ``num_examples``: partition to
    data size; ``silent``: partitions that do not say their steps; ``seen``: gets every config.
    """

    def train(message: Message, context: Context) -> Message:
        partition = partition_of(context)
        arrays = message.content["arrays"]
        config = message.content["config"]
        steps = int(config.get("num-steps", 4))
        if seen is not None:
            seen.append((int(config["server-round"]), partition, dict(config)))
        w = local_model(arrays["w"].numpy(), partition, steps)
        count = arrays["n"].numpy()
        metrics = {
            "num-examples": (num_examples or {}).get(partition, 100),
            "examples-processed": steps * BATCH,
            "train-loss": float(np.mean((w - goal(partition)) ** 2)),
        }
        if partition not in silent:
            metrics["num-steps"] = (claims or {}).get(partition, steps)
        new = {"w": Array(w), "n": Array(np.asarray(count + steps, count.dtype))}
        return reply_with(message, metrics, new)

    profile = {"num-examples": 100, "num-steps": 10, "examples-processed": 10 * BATCH}
    return app_of(train, mods, profile)


def steps_arrays() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(3, np.float32)), "n": Array(np.array(0))})
