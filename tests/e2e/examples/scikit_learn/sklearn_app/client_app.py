"""What a node does."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearn_app.task import BATCH_SIZE, Batches, load_data, make_model

app = ClientApp()


def open_node(msg: Message, context: Context):
    """Load the model that was sent, and the node's data."""
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return make_model(*msg.content["arrays"].to_numpy_ndarrays()), *data


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model, (inputs, targets), _ = open_node(msg, context)
    sampler = np.array_split(np.arange(len(targets)), len(targets) // BATCH_SIZE)
    batches = Batches(inputs, targets, sampler)
    for some_inputs, some_targets in batches:
        model.partial_fit(some_inputs, some_targets)
    loss = log_loss(targets, model.predict_proba(inputs), labels=model.classes_)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(targets)})
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this node's data."""
    model, _, (inputs, targets) = open_node(msg, context)
    loss = log_loss(targets, model.predict_proba(inputs), labels=model.classes_)
    accuracy = model.score(inputs, targets)
    figures = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(targets)}
    return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)
