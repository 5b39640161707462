"""Trainings of several seeds, and what one method gains over another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from flwr_hetero_studies.core import curves
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import StepCosts, costs
from flwr_hetero_studies.papers.mercury.training import Sampling, TrainedRun, Workload, train
from flwr_hetero_studies.tasks import data_shape

BELOW = (0.0025, 0.005, 0.01)
"""Targets: accuracy below the plateau of standard SGD; a gain is the geometric mean of three."""
PLATEAU = 0.2
"""Last part of a run, whose mean accuracy is its plateau."""
WINDOW = 5
"""Evaluations that are averaged before a crossing is looked for."""
LONGER = 2
"""AdaComm is trained for so many times as many steps: it has fewer exchanges for them."""


@dataclass(frozen=True)
class SeededTask:
    """A task, and the seeds of its trainings."""

    task: Workload
    seeds: tuple[int, ...]

    def train(self, method: Sampling, cost: StepCosts | None = None) -> TrainedRun:
        task = self.task
        if method.adapts_steps:
            steps, evaluations = LONGER * task.num_steps, LONGER * task.evaluations
            task = replace(task, num_steps=steps, evaluations=evaluations)
        cost = cost or costs(100, task.workers)
        return mean_of([train(task, method, cost, seed) for seed in self.seeds])

    def changed(self, **changes: Any) -> "SeededTask":
        return replace(self, task=replace(self.task, **changes))


FAST: dict[str, tuple[Workload, int]] = {
    "images": (Workload("digits", "mlp", 8, 300, 100), 4),
    "numbers": (Workload("breast-cancer", "softmax", 8, 60, 60), 8),
    "texts": (Workload("stdlib", "bag", 16, 200, 50, rows=2000), 2),
}


def cell(options: Options, kind: str) -> SeededTask:
    task, count = FAST[kind]
    if not options.fast:
        shape, _ = data_shape(options.dataset(kind))
        is_image, count = len(shape) == 3 and min(shape[1:]) >= 8, 1
        task = Workload(options.dataset(kind), *(("resnet18", 32) if is_image else ("auto", 64)))
    return SeededTask(task, tuple(range(count * options.seed, count * (options.seed + 1))))


def mean_of(runs: Sequence[TrainedRun]) -> TrainedRun:
    *columns, moved = (np.mean(each, axis=0).tolist() for each in zip(*runs, strict=True))
    return TrainedRun._make([*columns, round(moved)])


def smooth(run: TrainedRun) -> curves.Vector:
    return curves.smooth(run.accuracy, WINDOW, centred=True)


def plateau(run: TrainedRun) -> float:
    return float(smooth(run)[-max(1, int(PLATEAU * len(run.accuracy))) :].mean())


def spent(run: TrainedRun, target: float, what: str = "seconds") -> float:
    """Return the seconds, exchanges or steps until an accuracy; infinite if never reached."""
    wrong = 1.0 - smooth(run)
    return curves.time_to(getattr(run, what), wrong, 1.0 - target, below=True)


def gain(base: TrainedRun, run: TrainedRun, what: str = "seconds") -> float:
    """Return how many times as much the base spends to come near its plateau; 0: never there."""
    targets = [plateau(base) - below for below in BELOW]
    # one crossing is chance; three of them are less so
    ratios = [spent(base, target, what) / spent(run, target, what) for target in targets]
    return exp(sum(map(log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0


def written(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio else "never"


def end_of(run: TrainedRun) -> str:
    return f"{100 * plateau(run):.2f} %"
