"""The node: train on important images, and score others while the update is on its way."""

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from flwr_hetero import keys
from flwr_hetero.mercury.scoring import collect_hidden, score_hidden
from flwr_hetero.mod import emulated_device, hetero
from flwr_hetero.sampler import MercurySampler
from mercury_app import task

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
    sampler = MercurySampler(len(train_set), config["batch-size"], scores="loss")
    loader = hetero.batches(DataLoader(train_set, batch_sampler=sampler), msg)
    # Take up the scores that were computed after the last message.
    collect_hidden(sampler, context)
    loss = task.train(model, loader, loader.criterion(), 1, config["learning-rate"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(train_set)})
    # Score more images while the reply is on the network, and count them for emulated devices.
    metrics[keys.EXAMPLES_HIDDEN] = score_hidden(model, train_set.tensors, context, sampler)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    content[keys.SAMPLER] = ConfigRecord(sampler.summary())
    return Message(RecordDict(content), reply_to=msg)
