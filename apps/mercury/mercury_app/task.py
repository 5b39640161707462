"""The model, the data, and how a model is trained and tested."""

from functools import cache
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, disable_progress_bars
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import pil_to_tensor

disable_progress_bars()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(images: TensorDataset) -> nn.Module:
    """Make a small CNN for ten classes, and for images with as many channels as these."""
    channels = images.tensors[0].shape[1]
    model = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    return model.to(DEVICE)


@cache
def load_splits(dataset: str) -> dict[str, Dataset]:
    """Load the splits ``train`` and ``test``; the digits of scikit-learn need no download."""
    if dataset != "digits":
        federated = FederatedDataset(dataset=dataset, partitioners={})
        return {split: federated.load_split(split) for split in ("train", "test")}
    bunch = load_digits()
    pixels = (bunch.images * 255 / 16).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    digits = Dataset.from_dict({"image": list(pixels), "label": bunch.target}, features)
    return digits.train_test_split(test_size=0.2, seed=0)


@cache
def divide(dataset: str, num_nodes: int, alpha: float, seed: int) -> DirichletPartitioner:
    """Divide the training images among the nodes, unequally."""
    partitioner = DirichletPartitioner(
        num_nodes, partition_by="label", alpha=alpha, self_balancing=True, seed=seed
    )
    partitioner.dataset = load_splits(dataset)["train"]
    return partitioner


@cache
def load_partition(
    partition_id: int, num_partitions: int, dataset: str, alpha: float, seed: int
) -> TensorDataset:
    """Load the images of a node."""
    partitioner = divide(dataset, num_partitions, alpha, seed)
    return to_tensors(partitioner.load_partition(partition_id))


def load_test(dataset: str) -> TensorDataset:
    """Load the images that no node has, for the server."""
    return to_tensors(load_splits(dataset)["test"])


def to_tensors(rows: Dataset) -> TensorDataset:
    """Decode images and scale their pixels to the range from -1 to 1."""
    # The column is called "img" in CIFAR-10, and "image" in most other data sets.
    column = "img" if "img" in rows.column_names else "image"
    images = torch.stack([pil_to_tensor(image) for image in rows[column]])
    return TensorDataset(images / 127.5 - 1, torch.tensor(rows["label"][:]))


def train(
    model: nn.Module, loader: DataLoader, criterion: Any, num_epochs: int, learning_rate: float
) -> float:
    """Train a model; return the mean loss of the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    losses = []
    for _ in range(num_epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: nn.Module, images: TensorDataset) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    model.eval()
    loss = 0.0
    correct = 0
    for inputs, labels in DataLoader(images, batch_size=256):
        logits = model(inputs.to(DEVICE)).cpu()
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
    return loss / len(images), correct / len(images)
