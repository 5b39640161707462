"""What a node does."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearn_app.task import BATCH_SIZE, Batches, load_data, make_model

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model = make_model(*msg.content["arrays"].to_numpy_ndarrays())
    inputs, targets = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    sampler = np.array_split(np.arange(len(targets)), len(targets) // BATCH_SIZE)
    batches = Batches(inputs, targets, sampler)
    for some_inputs, some_targets in batches:
        model.partial_fit(some_inputs, some_targets)
    loss = log_loss(targets, model.predict_proba(inputs), labels=model.classes_)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(targets)})
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
