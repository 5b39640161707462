"""Trainings of several seeds, and what one method gains over another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero_studies.core.curves import time_to
from flwr_hetero_studies.core.experiment import Curve
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import Costs, costs
from flwr_hetero_studies.papers.mercury.training import Method, Run, Setting, train
from flwr_hetero_studies.tasks import data_shape

BELOW = (0.0025, 0.005, 0.01)
"""Targets: accuracy below the plateau of standard SGD; a gain is the geometric mean of three."""
PLATEAU = 0.2
"""Last part of a run, whose mean accuracy is its plateau."""
WINDOW = 5
"""Evaluations that are averaged before a crossing is looked for."""
LONGER = 2
"""AdaComm is trained for so many times as many steps: it has fewer exchanges for them."""
KINDS = {"images": "image classification", "numbers": "speech", "texts": "language"}
"""Kinds of embedded data, and the task of the paper each stands for."""


@dataclass(frozen=True)
class Cell:
    """A task, and the seeds of its trainings."""

    task: Setting
    seeds: tuple[int, ...]

    def train(self, method: Method, cost: Costs | None = None) -> Run:
        """Train with each seed and average."""
        task = self.task
        if method.adapts_steps:
            steps, evaluations = LONGER * task.num_steps, LONGER * task.evaluations
            task = replace(task, num_steps=steps, evaluations=evaluations)
        return mean_of(
            [train(task, method, cost or costs(100, task.workers), seed) for seed in self.seeds]
        )


FAST: dict[str, tuple[Setting, int]] = {
    "images": (Setting("digits", "mlp", 8, 300, 100), 4),
    "numbers": (Setting("breast-cancer", "softmax", 8, 60, 60), 8),
    "texts": (Setting("stdlib", "bag", 16, 200, 50, rows=2000), 2),
}


def cell(options: Options, kind: str) -> Cell:
    """Return the task of a kind in the form that was asked for."""
    if options.fast:
        task, count = FAST[kind]
    else:
        shape, _ = data_shape(options.dataset(kind))
        is_image = len(shape) == 3 and min(shape[1:]) >= 8
        task = Setting(
            options.dataset(kind),
            "resnet18" if is_image else "auto",
            batch_size=32 if is_image else 64,
        )
        count = 1
    return Cell(task, tuple(range(count * options.seed, count * (options.seed + 1))))


def mean_of(runs: Sequence[Run]) -> Run:
    """Average runs that were evaluated equally often."""

    def mean(name: str) -> list[float]:
        return np.mean([getattr(run, name) for run in runs], axis=0).tolist()  # type: ignore[no-any-return]

    moved = round(float(np.mean([run.moved for run in runs])))
    return Run(mean("steps"), mean("exchanges"), mean("seconds"), mean("accuracy"), moved)


def smooth(values: ArrayLike) -> NDArray[np.float64]:
    """Average each value with its neighbours.

    >>> smooth([0.0, 0.0, 1.0, 0.0, 0.0]).tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """
    padded = np.pad(np.asarray(values, float), WINDOW // 2, "edge")
    return np.convolve(padded, np.ones(WINDOW) / WINDOW, "valid")


def plateau(run: Run) -> float:
    """Return the mean accuracy of the last part."""
    return float(smooth(run.accuracy)[-max(1, int(PLATEAU * len(run.accuracy))) :].mean())


def spent(run: Run, target: float, what: str = "seconds") -> float:
    """Return the seconds, exchanges or steps until an accuracy; infinite if never reached.

    >>> run = Run([1, 2, 3], [1, 2, 3], [0.1, 0.2, 0.3], [0.0, 0.5, 0.5])
    >>> spent(run, 0.9)
    inf
    """
    wrong = (1.0 - smooth(run.accuracy)).tolist()
    return time_to(getattr(run, what), wrong, 1.0 - target, below=True)


def gain(base: Run, run: Run, what: str = "seconds") -> float:
    """Return how many times as much the base spends to come near its plateau; 0: never there."""
    targets = [plateau(base) - below for below in BELOW]
    ratios = [spent(base, target, what) / spent(run, target, what) for target in targets]
    return exp(sum(map(log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0


def written(ratio: float) -> str:
    """Write a gain."""
    return f"{ratio:.2f}x" if ratio else "never"


def curve(run: Run, what: str) -> Curve:
    """Return accuracy in percent against what was spent."""
    return Curve(getattr(run, what), [100 * value for value in run.accuracy])
