"""Models for images and series, and those that take any numbers."""

from math import prod

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
SMALL = 16
"""Smaller images are pooled once by ``cnn``, not twice."""
LARGE = 64
"""For images of this size ``auto`` takes ``resnet18``, and that has its original stem."""


def softmax(shape: Shape, num_classes: int) -> nn.Module:
    """Multinomial logistic regression: a convex problem."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), num_classes))


def mlp(shape: Shape, num_classes: int) -> nn.Module:
    """One hidden layer of 300 units (PGD, section 6)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), 300), nn.ReLU(), nn.Linear(300, num_classes)
    )


def cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Two convolutions of 16 and 32 channels and one linear layer."""
    # Pooled twice, an image of 8x8 would be too small.
    pool = nn.Identity() if min(shape[1:]) < SMALL else nn.MaxPool2d(2)
    body = nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1), pool, nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(*body, nn.Linear(_features(body, shape), num_classes))


def lenet(shape: Shape, num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling; 28x28 images are padded to 32x32."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2 if shape[1] < 32 else 0), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        *body, nn.Linear(_features(body, shape), 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
    )  # fmt: skip


def resnet18(shape: Shape, num_classes: int) -> nn.Module:
    """Torchvision's ResNet-18 with GroupNorm; small images get a 3x3 stem without pooling."""
    # This import takes seconds, so do it only here.
    from torchvision import models

    model: nn.Module = models.resnet18(
        weights=None, num_classes=num_classes, norm_layer=lambda width: nn.GroupNorm(32, width)
    )
    # The original stem would shrink an image by four before the first block.
    if min(shape[1:]) < LARGE:
        model.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif shape[0] != 3:
        model.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    return model


def _features(body: nn.Module, shape: Shape) -> int:
    with torch.no_grad():
        flat: Tensor = body(torch.zeros(1, *shape))
    return flat.shape[1]


class AutoregressiveMLP(nn.Module):
    """Predict the next value from a window, then move the window on by what was predicted."""

    def __init__(self, steps: int, horizon: int, width: int = 64) -> None:
        super().__init__()
        self.horizon = horizon
        self.layers = nn.Sequential(
            nn.Linear(steps, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, series: Tensor) -> Tensor:
        window = series.flatten(1)
        forecasts = []
        for _ in range(self.horizon):
            forecasts.append(self.layers(window))
            # The forecast takes the place of the oldest value.
            window = torch.cat([window[:, 1:], forecasts[-1]], dim=1)
        return torch.cat(forecasts, dim=1)


def ar_mlp(shape: tuple[int, ...], outputs: tuple[int]) -> nn.Module:
    """Three layers, 64 wide, one step at a time (CD-GraB, appendix D.1)."""
    return AutoregressiveMLP(shape[1], outputs[0])
