"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from transformers import Trainer

from hugging_face_app.task import load_data, make_arguments, make_model

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this node's data."""
    model = make_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    trainer = Trainer(model, make_arguments(), train_dataset=data)
    result = trainer.train()
    metrics = MetricRecord({"train_loss": result.training_loss, "num-examples": len(data)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
