"""The larger network of the race on throttled nodes, in a small module, which each node imports."""

from torch import nn

WIDTH = 16


def large_cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three pairs of normalised convolutions of 16, 32 and 64 channels, and one linear layer."""
    layers: list[nn.Module] = []
    before = shape[0]
    for width in (WIDTH, 2 * WIDTH, 4 * WIDTH):
        for channels in (before, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        before = width
    features = before * (shape[1] // 8) * (shape[2] // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, num_classes))
