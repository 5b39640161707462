"""What the samplers train on: data sets, their variants, models, learning rates tried."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from flwr_hetero_studies.core.plan import Data
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.tasks import load_partition, load_test
from flwr_hetero_studies.tasks.data import Examples


class SamplerTask(NamedTuple):
    """A model on a data set, and the learning rates that are tried."""

    model: str
    size: int
    rates: tuple[float, ...]
    seeds: int = 5
    settings: Case = {}  # noqa: RUF012
    """Those that differ."""
    tuned_on: str = ""
    """A task whose grid holds for this one too."""


TASKS: dict[str, dict[str, SamplerTask]] = {
    "fashion_mnist": {
        **{f"images{variant}": SamplerTask("mlp", 64, (0.1, 0.3, 0.6)) for variant in
           ("", ", 30 % wrong labels", ", rare classes", ", each five times")},
        "images, cnn": SamplerTask("cnn", 64, (0.1, 0.3), 2),
        "60,000 images, cnn": SamplerTask(
            "cnn", 64, (0.1, 0.3), 2, {"rows": 60000, "epochs": 5, "evaluations": 12},
            "images, cnn",
        ),
    },
    "cifar10": {
        "photos, ResNet-18": SamplerTask(
            "resnet18", 32, (0.03, 0.1), 2,
            {"rows": 2400, "epochs": 10, "evaluations": 10, "test-rows": 500},
        ),
    },
    "stdlib": {
        "texts": SamplerTask("bag", 32, (0.6, 1.2, 2.4)),
        "texts, cnn": SamplerTask("textcnn", 32, (0.1, 0.3, 0.6), 3),
    },
    "synthetic": {n: SamplerTask("mlp", 32, (0.3, 0.6, 1.2)) for n in ("table", "table, rare")},
    "digits": {f"digits{variant}": SamplerTask("mlp", 16, (0.1, 0.3, 0.6)) for variant in
               ("", ", rare classes", ", 30 % wrong labels")},
}  # fmt: skip


@lru_cache(2)
def split(dataset: str, rows: int) -> tuple[Examples, Examples]:
    if dataset == "synthetic":
        from sklearn.datasets import make_classification

        x, y = make_classification(
            30000, 40, n_informative=12, n_redundant=8, n_classes=5, n_clusters_per_class=4,
            class_sep=1.5, flip_y=0.01, random_state=7,
        )  # fmt: skip
        x = torch.from_numpy(((x - x.mean(0)) / x.std(0)).astype(np.float32))[..., None, None]
        y = torch.from_numpy(y).long()
        return Examples(x[:20000][:rows], y[:20000][:rows]), Examples(x[20000:], y[20000:])
    order = np.random.default_rng(7)
    train, test = load_partition(dataset, 0, 1, partition="iid"), load_test(dataset)
    return Examples(*train.take(order.permutation(len(train))[:rows])), test


def make_data(case: Case, seed: int, data: Data) -> tuple[Examples, Examples]:
    """Make the task's variant; the grid evaluates on a sixth that it does not train on."""
    train, test = split(data.source, case["rows"])
    test = Examples(test.inputs[: case.get("test-rows")], test.targets[: case.get("test-rows")])
    rng, classes = np.random.default_rng(5000 + seed), int(test.targets.max()) + 1
    if case["experiment"] == "grid":
        cut = len(train) * 5 // 6
        train, test = (
            Examples(train.inputs[part], train.targets[part])
            for part in (slice(cut), slice(cut, None))
        )
    index = np.arange(len(train))
    if case["task"].endswith("each five times"):
        index = np.tile(rng.permutation(index)[: len(index) // 5], 5)
    # from all of the first class to 1 in 50 of the last
    if "rare" in case["task"]:
        share = 0.02 ** (train.targets.numpy() / (classes - 1))
        index = np.flatnonzero(rng.random(len(train)) < share)
    inputs, targets = train.take(index)
    if case["task"].endswith("wrong labels"):
        # in training only: the test set tells the truth
        wrong = rng.random(len(targets)) < 0.3
        targets[wrong] = torch.from_numpy(rng.integers(classes, size=wrong.sum()))
    return Examples(inputs, targets), test
