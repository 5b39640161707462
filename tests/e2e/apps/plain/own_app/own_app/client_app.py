"""What a node does: least squares by single steps."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
STEPS, BATCH = 20, 16


def data_of(context):
    """Draw a node's data."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    inputs = rng.standard_normal((STEPS * BATCH, 5))
    return inputs, inputs @ np.arange(1.0, 6.0) + rng.standard_normal(len(inputs))


@app.train()
def train(msg, context):
    """Take some steps."""
    (w,), (inputs, targets) = msg.content["arrays"].to_numpy_ndarrays(), data_of(context)
    rng = np.random.default_rng()
    for _ in range(STEPS):
        chosen = rng.integers(len(targets), size=BATCH)
        w = w - 0.05 * inputs[chosen].T @ (inputs[chosen] @ w - targets[chosen]) / BATCH
    content = RecordDict({"arrays": ArrayRecord([w])})
    content["metrics"] = MetricRecord({"num-examples": len(targets)})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    """Return the mean of the squared errors."""
    (w,), (inputs, targets) = msg.content["arrays"].to_numpy_ndarrays(), data_of(context)
    loss = float(np.mean((inputs @ w - targets) ** 2))
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(targets)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
