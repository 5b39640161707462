"""The node: prefer images whose gradient points where that of all images points."""

from functools import partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from flwr_hetero import keys
from flwr_hetero.mod import emulated_device, hetero
from flwr_hetero.sampler import PGDSampler
from pgd_app import task

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
    if config["rule"] == "uniform":
        loader = hetero.batches(loader, msg)
        criterion = torch.nn.CrossEntropyLoss()
    else:
        pgd = partial(PGDSampler, rule=config["rule"], renewal_share=config["renewal-share"])
        loader = hetero.batches(loader, msg, sampler=pgd, model=model)
        criterion = loader.criterion()
    loss = task.train(model, loader, criterion, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(train_set)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    if config["rule"] != "uniform":
        content[keys.SAMPLER] = ConfigRecord(loader.batch_sampler.summary())
    return Message(RecordDict(content), reply_to=msg)
