"""Model, data and training loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A CNN for images of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classes = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images):
        return self.classes(self.features(images).flatten(1))


def load_data(partition_id, num_partitions, batch_size):
    """Give a node its own part of the digits, a fifth of it for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    mine = torch.arange(partition_id, len(labels), num_partitions)
    cut = len(mine) // 5
    train = TensorDataset(images[mine[cut:]], labels[mine[cut:]])
    test = TensorDataset(images[mine[:cut]], labels[mine[:cut]])
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    return train_loader, DataLoader(test, batch_size=batch_size)


def train(model, loader, epochs, learning_rate):
    """Train and return the mean loss of the batches."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(model, loader):
    """Return loss and accuracy."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images)
            loss += criterion(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss / count, correct / count
