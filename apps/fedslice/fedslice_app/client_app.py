"""The node: train for as many steps as fit a slice of time."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from fedslice_app import task
from flwr_hetero.mod import emulated_device, hetero

# hetero is the node's part of the method. emulated_device gives each node a device of its own.
app = ClientApp(mods=[emulated_device, hetero])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this node's images."""
    config = context.run_config
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    train_set = task.load_partition(*partition, config["dataset"], config["alpha"], config["seed"])
    model = task.make_model(train_set)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = DataLoader(train_set, batch_size=config["batch-size"], shuffle=True)
    loader = hetero.batches(loader, msg)
    criterion = torch.nn.CrossEntropyLoss()
    loss = task.train(model, loader, criterion, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(train_set)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)
