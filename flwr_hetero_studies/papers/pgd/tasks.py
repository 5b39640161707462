"""The paper's data and models: logistic regression on drawn points, MLPs and a CNN on images."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.tasks import Examples, data_shape, load_partition, make_model

NOISE = 0.1
"""Deviation of what is added to each number of a point after it was labelled."""
CNN_PIXELS = 28
"""Images from this size on get the paper's CNN, smaller ones the package's."""


@dataclass(frozen=True)
class Problem:
    """Data, and how a model for it is made from a seed."""

    examples: Examples
    make_model: Callable[[int], nn.Module]


def each_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def points(num_points: int, dim: int) -> Problem:
    """Draw points for logistic regression, labelled by a random hyperplane."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(dim, generator=generator)
    drawn = torch.randn(num_points, dim, generator=generator)
    targets = (drawn @ normal > 0).long()
    # the noise comes after the labels
    inputs = drawn + NOISE * torch.randn(drawn.shape, generator=generator)
    examples = Examples(inputs[:, :, None, None], targets)
    return Problem(examples, lambda seed: make_model("softmax", (dim, 1, 1), 2, seed))


def images(dataset: str, model: str) -> Problem:
    """Take images: with ``mlp``, ``cnn``, or ``mlp-100`` of the paper's Figure 1."""
    shape, num_classes = data_shape(dataset)
    assert isinstance(num_classes, int), "images have classes"

    def build(seed: int) -> nn.Module:
        if model == "mlp" or (model == "cnn" and min(shape[1:]) < CNN_PIXELS):
            return make_model(model, shape, num_classes, seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            body = small_mlp if model == "mlp-100" else paper_cnn
            return body(shape, num_classes)

    whole = load_partition(dataset, 0, 1)
    return Problem(Examples(whole.inputs, whole.targets), build)


def small_mlp(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    first = nn.Linear(prod(shape), 100)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(100, num_classes))


def paper_cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions of 10 and 20 kernels of 5x5, each pooled, and a linear layer (V-D)."""
    # the paper pools by 5x5, which leaves nothing of 28x28 after the second
    sides = [((side - 4) // 2 - 4) // 2 for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 10, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(20 * sides[0] * sides[1], num_classes),
    )  # fmt: skip


def of_figure(options: Options, model: str) -> Problem:
    """Take the data of a figure: of its images, or the points of logistic regression."""
    if model == "lr":
        return points(*options.pick((4000, 400), (10_000, 1000)))
    return images(options.dataset("images"), model)
