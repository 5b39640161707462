"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


def open_node(msg: Message, context: Context):
    """Load the model that was sent, and the node's data."""
    model = task.Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    train_loader, test_loader = task.load_data(*partition, context.run_config["batch-size"])
    return model, train_loader, test_loader


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model, loader, _ = open_node(msg, context)
    epochs, learning_rate = context.run_config["local-epochs"], msg.content["config"]["lr"]
    loss = task.train(model, loader, epochs, learning_rate)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this node's data."""
    model, _, loader = open_node(msg, context)
    loss, accuracy = task.test(model, loader)
    figures = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)
