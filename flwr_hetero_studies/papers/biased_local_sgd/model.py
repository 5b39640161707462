"""The model of biased local SGD's experiments on CIFAR-10."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from flwr_hetero_studies.tasks.models.images import Shape


class Block(nn.Module):
    """Two convolutions beside a shortcut that drops pixels and fills up channels with zeros."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if before == width else 2
        self.more = width - before
        self.first = nn.Conv2d(before, width, 3, stride=self.stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = relu(self.first_norm(self.first(inputs)))
        residual = self.second_norm(self.second(hidden))
        kept = inputs[:, :, :: self.stride, :: self.stride]
        return relu(residual + pad(kept, (0, 0, 0, 0, 0, self.more)))


def resnet20(shape: Shape, num_classes: int) -> nn.Module:
    """ResNet-20 for small images (He et al., section 4.2): 0.27 million parameters."""
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(before, width) for before, width in pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)),
    )
