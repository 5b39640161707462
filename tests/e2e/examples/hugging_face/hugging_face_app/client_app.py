"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from transformers import Trainer

from hugging_face_app.task import load_data, make_arguments, make_model

app = ClientApp()


def open_node(msg: Message, context: Context):
    """Load the model that was sent, and the node's data."""
    model = make_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    return model, *load_data(*partition)


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model, data, _ = open_node(msg, context)
    trainer = Trainer(model, make_arguments(), train_dataset=data)
    result = trainer.train()
    metrics = MetricRecord({"train_loss": result.training_loss, "num-examples": len(data)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this node's data."""
    model, _, data = open_node(msg, context)
    loss = Trainer(model, make_arguments()).evaluate(data)["eval_loss"]
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(data)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
