"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from lightning_app.task import Classifier, load_data, make_trainer

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model = Classifier()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    trainer = make_trainer()
    trainer.fit(model, loader)
    loss = trainer.callback_metrics["train_loss"].item()
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
