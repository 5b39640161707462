"""The node: train the model, and test it for the server's choice of tiers."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.mod import emulated_device, hetero, preload
from tifl_app import task

# hetero times the training. emulated_device reports the time of an emulated device instead.
app = ClientApp(mods=[emulated_device, hetero])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this node's images."""
    config = context.run_config
    train_set, _ = load_images(context)
    model = load_model(msg, train_set)
    loader = DataLoader(train_set, batch_size=config["batch-size"], shuffle=True)
    loader = hetero.batches(loader, msg)
    # The same seed gives the same order of images.
    torch.manual_seed(config["seed"] + msg.content["config"]["server-round"])
    criterion = torch.nn.CrossEntropyLoss()
    loss = task.train(model, loader, criterion, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(train_set)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model on images of this node that it does not train on."""
    _, test_set = load_images(context)
    loss, accuracy = task.test(load_model(msg, test_set), test_set)
    metrics = {"eval-loss": loss, "eval-acc": accuracy, "num-examples": len(test_set)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@preload  # A warm node reads its images once.
def load_images(context: Context) -> tuple[TensorDataset, TensorDataset]:
    """Load this node's images for training and for testing."""
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    config = context.run_config
    return task.load_partition(*partition, config["dataset"], config["alpha"], config["seed"])


def load_model(msg: Message, images: TensorDataset) -> torch.nn.Module:
    """Make the model with the parameters that the server sent."""
    model = task.make_model(images)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model
