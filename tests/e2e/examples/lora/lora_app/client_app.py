"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from lora_app import task

app = ClientApp()


def open_node(msg: Message, context: Context):
    """Put the adapters that were sent into the base, and load the node's data."""
    model = task.make_model()
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    partition = context.node_config["partition-id"], context.node_config["num-partitions"]
    return model, *task.load_data(*partition)


@app.train()
def train(msg: Message, context: Context):
    """Train the adapters on this node's data."""
    model, loader, *_ = open_node(msg, context)
    task.train(model, loader)
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this node's data."""
    model, _, images, labels = open_node(msg, context)
    found = {"eval_acc": task.accuracy(model, images, labels), "num-examples": len(labels)}
    return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=msg)
