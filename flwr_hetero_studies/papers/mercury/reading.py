"""What is read off Mercury's trainings: plateaus, and gains with an interval over seeds."""

from collections.abc import Callable
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from flwr_hetero_studies.core import curves
from flwr_hetero_studies.papers.mercury.training import Runs, TrainedRun

BELOW = (0.0025, 0.005, 0.01)
"""Targets: accuracy below the plateau of standard SGD; a gain is the geometric mean of three."""
PLATEAU = 0.2
"""The plateau is the last part of a run."""
WINDOW = 5
"""Evaluations that are averaged before a crossing is looked for."""


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


def mean_of(runs: Runs) -> TrainedRun:
    *columns, moved = (np.mean(each, axis=0).tolist() for each in zip(*runs, strict=True))
    return TrainedRun._make([*columns, round(moved)])


def jackknife(measure: Callable[..., float], *groups: Runs) -> NDArray[np.float64]:
    """Return each seed's part in a measure of mean curves (Tukey's pseudo-values).

    A seed alone has a test accuracy in steps of a third of a point, too coarse for a crossing.
    """
    count = len(groups[0])
    whole = measure(*map(mean_of, groups))
    if count == 1:
        return np.array([whole])
    rest = [measure(*(mean_of(g[:n] + g[n + 1 :]) for g in groups)) for n in range(count)]
    # what is never reached is infinite
    with np.errstate(invalid="ignore"):
        return count * whole - (count - 1) * np.array(rest)


def gains(base: Runs, runs: Runs, what: str = "seconds") -> NDArray[np.float64]:
    def measure(one: TrainedRun, other: TrainedRun) -> float:
        ratio = gain(one, other, what)
        return log(ratio) if ratio else -inf

    return np.nan_to_num(np.exp(jackknife(measure, base, runs)), nan=0.0, posinf=0.0)


def typical(ratios: NDArray[np.float64]) -> float:
    return exp(float(np.log(ratios).mean())) if min(ratios) > 0 else 0.0


def plateaus(runs: Runs) -> NDArray[np.float64]:
    """Return each seed's plateau in percent."""
    return 100 * np.array([plateau(run) for run in runs])


def written(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio else "never"


def end_of(runs: Runs) -> str:
    return f"{plateaus(runs).mean():.2f} %"


def step_s(runs: Runs) -> float:
    """Return the mean seconds of a step."""
    return sum(run.seconds[-1] / run.steps[-1] for run in runs) / len(runs)
