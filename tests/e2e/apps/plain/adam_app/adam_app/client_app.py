"""What a node does: Adam, two classes of digits, the same seed in each call."""

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as Reply
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adam_app.model import Net

app = ClientApp()


def load_data(context):
    """Give a node a part of two classes."""
    torch.manual_seed(0)
    mine = int(context.node_config["partition-id"])
    inputs, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(inputs / 16, dtype=torch.float32)
    labels = torch.tensor(labels, dtype=torch.int64)
    keep = (labels == mine % 10) | (labels == (mine + 3) % 10)
    return TensorDataset(inputs[keep][mine % 2 :: 2], labels[keep][mine % 2 :: 2])


@app.train()
def train(message, context):
    """Train for an epoch."""
    data, net = load_data(context), Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = DataLoader(data, batch_size=16)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    for inputs, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Reply(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Test on all digits."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_digits(return_X_y=True)
    with torch.no_grad():
        outputs = net(torch.tensor(inputs / 16, dtype=torch.float32))
    loss = float(functional.cross_entropy(outputs, torch.tensor(labels, dtype=torch.int64)))
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(labels)})
    return Reply(RecordDict({"metrics": metrics}), reply_to=message)
