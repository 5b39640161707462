"""The paper's tasks: synthetic data, images, and its three models."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from flwr_hetero.task import load_partition, make_model


@dataclass(frozen=True)
class Task:
    """Data and how to make a model for it."""

    inputs: Tensor
    targets: Tensor
    model: str

    def make(self, seed: int) -> nn.Module:
        """Build the model, the same for each method with one seed."""
        if self.model == "cnn":
            return paper_cnn(seed)
        classes = int(self.targets.max()) + 1
        return make_model(self.model, tuple(self.inputs.shape[1:]), classes, seed)


def paper_cnn(seed: int) -> nn.Module:
    """Build the two-layer CNN of section V-D: 10 and 20 kernels of 5x5, ReLU, pooling.

    The paper pools by 5x5, which leaves nothing of 28x28 images after the second convolution;
    the usual 2x2 is taken here.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(320, 10),
        )  # fmt: skip


def linear_data(num_samples: int, dim: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw points, label them by a random hyperplane, then add Gaussian noise to each dimension."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(dim, generator=generator)
    points = torch.randn(num_samples, dim, generator=generator)
    targets = (points @ normal > 0).long()
    return points + noise * torch.randn(points.shape, generator=generator), targets


def teacher_data(num_samples: int, dim: int, classes: int, noise: float) -> tuple[Tensor, Tensor]:
    """Draw points, label them by a random network of one hidden layer, then add noise."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(num_samples, dim, generator=generator)
    hidden = (points @ torch.randn(dim, 50, generator=generator) / math.sqrt(dim)).relu()
    scores = hidden @ torch.randn(50, classes, generator=generator)
    targets = (scores - scores.mean(0)).argmax(1)
    return points + noise * torch.randn(points.shape, generator=generator), targets


@lru_cache(2)
def make_task(name: str, num_samples: int, fashion: str | None) -> Task:
    """Build a task by name.

    ``lr-synthetic`` and ``mlp-synthetic`` need no files; ``lr-fashion``, ``mlp-fashion`` and
    ``cnn-fashion`` need the folder of Fashion-MNIST as Parquet.
    """
    kind, data = name.split("-")
    model = {"lr": "softmax", "mlp": "mlp", "cnn": "cnn"}[kind]
    if data == "synthetic":
        make = linear_data(num_samples, 1000, 0.1) if kind == "lr" else teacher_data(
            num_samples, 100, 10, 0.1
        )  # fmt: skip
        return Task(make[0][:, None, None, :], make[1], model)
    if fashion is None:
        raise SystemExit(f"{name} needs --fashion, the folder that holds train.parquet")
    examples = load_partition(fashion, 0, 60_000 // num_samples, partition="iid")
    return Task(examples.inputs[:num_samples], examples.targets[:num_samples], model)
