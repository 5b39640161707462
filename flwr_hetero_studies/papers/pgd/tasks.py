"""The paper's data and models: logistic regression on drawn points, an MLP and a CNN on images."""

import torch
from torch import nn

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd.workers import Task
from flwr_hetero_studies.tasks import Examples, data_shape, load_partition, make_model

CNN_PIXELS = 28
"""Images from this size on get the paper's CNN, smaller ones the package's."""


def points(options: Options) -> Task:
    """Draw points, label them by a random hyperplane, and add noise to each dimension."""
    num_points, dim = options.pick((4000, 400), (10_000, 1000))
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(dim, generator=generator)
    drawn = torch.randn(num_points, dim, generator=generator)
    noisy = drawn + 0.1 * torch.randn(drawn.shape, generator=generator)
    examples = Examples(noisy[:, :, None, None], (drawn @ normal > 0).long())
    return Task(examples, lambda seed: make_model("softmax", (dim, 1, 1), 2, seed))


def images(options: Options, model: str) -> Task:
    """Take images: with ``mlp``, ``cnn``, or ``mlp-100`` of the paper's Figure 1."""
    dataset = options.dataset("images")
    shape, num_classes = data_shape(dataset)
    assert isinstance(num_classes, int), "images have classes"

    def build(seed: int) -> nn.Module:
        if model == "mlp" or (model == "cnn" and min(shape[1:]) < CNN_PIXELS):
            return make_model(model, shape, num_classes, seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            body = small_mlp if model == "mlp-100" else paper_cnn
            return body(shape, num_classes)

    return Task(load_partition(dataset, 0, 1), build)


def small_mlp(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One hidden layer of 100 (Figure 1)."""
    first = nn.Linear(shape[0] * shape[1] * shape[2], 100)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(100, num_classes))


def paper_cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions of 10 and 20 kernels of 5x5, each pooled, and a linear layer (section V-D).

    The paper pools by 5x5, which leaves nothing of 28x28 images after the second convolution;
    the usual 2x2 is taken here.
    """
    sides = [((side - 4) // 2 - 4) // 2 for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 10, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(20 * sides[0] * sides[1], num_classes),
    )  # fmt: skip
