"""The models of TiFL's section 5.2."""

import torch
from torch import nn

from flwr_hetero_studies.tasks.models.images import Shape


def cifar_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Four convolutions, two linear layers, dropout 0.25 (section 5.2); Keras' own widths."""
    body = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        nn.Flatten(),
    )
    return _with_head(body, shape, nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, num_classes))


def mnist_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Two convolutions and two linear layers, dropout 0.25 and 0.5 (TiFL, section 5.2)."""
    body = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
    )
    head = nn.LazyLinear(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes)
    return _with_head(body, shape, *head)


def leaf_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Two convolutions of 5x5 and two linear layers (LEAF, for FEMNIST)."""
    body = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    )
    return _with_head(body, shape, nn.LazyLinear(2048), nn.ReLU(), nn.Linear(2048, num_classes))


def _with_head(body: nn.Module, shape: Shape, *head: nn.Module) -> nn.Module:
    """Join them, and give the first linear layer as many inputs as there are."""
    model = nn.Sequential(body, *head).eval()
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    return model.train()
