"""The node: visit the images in the order that the server has found."""

from functools import partial

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from cd_grab_app import task
from flwr_hetero.mod import emulated_device, hetero
from flwr_hetero.sampler import OrderedSampler

# hetero is the node's part of the method. emulated_device gives each node a device of its own.
app = ClientApp(mods=[emulated_device, hetero])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this node's images."""
    config = context.run_config
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    train_set = task.load_partition(*partition, config["dataset"])
    model = task.make_model(train_set)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = DataLoader(train_set, batch_size=config["batch-size"], shuffle=True)
    ordered = partial(OrderedSampler, method=config["method"], seed=config["seed"] + partition[0])
    loader = hetero.batches(loader, msg, sampler=ordered, model=model)
    criterion = loader.criterion()
    loss = task.train(model, loader, criterion, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(train_set)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)
