"""What a method gains over SGD on the way to SGD's losses: fits, learning rates, steps, time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero_studies.core.curves import Vector, at, time_to
from flwr_hetero_studies.core.record import Line, by, seeds
from flwr_hetero_studies.papers.pgd.workers import DRAWN, LAST, SGD

PARTS = (0.2, 0.5, 0.9)
"""Of SGD's runs: their mean losses there are the targets."""


def falling(losses: Sequence[float]) -> Vector:
    """Fit a curve that never rises, by least squares (pool adjacent violators).

    Single evaluations jump at a high learning rate. The first of them under a target would
    count luck as speed; the fit treats jumps up and down alike.
    """
    blocks: list[tuple[float, int]] = []
    for loss in losses:
        blocks.append((loss, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def fit(line: Line) -> Vector:
    """Return the fall of the loss over a run; infinite from a divergence on."""
    # what has diverged stays infinite, whatever comes after
    losses = np.nan_to_num(line["curve"]["loss"] or [np.inf], nan=np.inf)
    whole = int(np.isfinite(losses).sum()) if np.isinf(losses).any() else len(losses)
    return np.concatenate([falling(losses[:whole]), losses[whole:]])


def end_of(line: Line) -> float:
    curve = line["curve"]
    whole = curve["iteration"] and curve["iteration"][-1] == line["case"]["iterations"]
    return float(np.nan_to_num(curve["loss"][-LAST:], nan=np.inf).mean()) if whole else np.inf


def best_rate(lines: Sequence[Line]) -> float | None:
    first = [line for line in lines if line["seed"] == 0]
    return float(min(first, key=end_of)["case"]["lr"]) if first else None


def chosen(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Keep each method's runs of a race at one learning rate; the unbiased rule takes SGD's."""
    methods = by(lines, "method")
    rates = {m: best_rate(methods[SGD] if m == DRAWN else runs) for m, runs in methods.items()}
    return {m: [r for r in runs if r["case"]["lr"] == rates[m]] for m, runs in methods.items()}


def mean_curve(runs: Sequence[Line], name: str) -> Vector:
    """Return the mean over seeds, as far as all of them go."""
    length = min(len(line["curve"]["loss"]) for line in runs)
    return np.asarray(np.mean([line["curve"][name][:length] for line in runs], axis=0))


def goals(sgd: Sequence[Line]) -> list[float]:
    mean = np.mean([fit(line) for line in sgd], axis=0)
    return [at(mean, part * (len(mean) - 1)) for part in PARTS]


def steps_to(line: Line, goal: float) -> float:
    """Count steps to a loss, between points by a straight line; infinite if never."""
    return time_to(line["curve"]["iteration"], fit(line), goal, below=True)


class RaceGain(NamedTuple):
    """What a method gains over SGD's median on the way to a mean loss of that, seed by seed.

    Steps are infinite and gains 0 where a seed never gets there.
    """

    steps: Vector
    in_steps: Vector
    in_time: Vector

    def cells(self) -> list[str]:
        missing = int(np.isinf(self.steps).sum())
        if 2 * missing >= len(self.steps):
            return [f"never in {missing} of {len(self.steps)}", ""]
        steps = f"{np.median(self.steps):.0f} ({np.median(self.in_steps):.2f}x)"
        least = "never" if missing else f"{self.in_time.min():.2f}"
        extent = f" ({least} to {self.in_time.max():.2f})" if len(self.steps) > 1 else ""
        return [steps, f"{np.median(self.in_time):.2f}x{extent}"]

    def brief(self) -> str:
        median = float(np.median(self.in_time))
        return f"{median:.2f}" if median > 0 else "never"


def gain(
    runs: Sequence[Line], sgd: Sequence[Line], part: int, cost: Mapping[str, float]
) -> RaceGain:
    """Compare runs with the median of SGD's; ``cost`` of start and step counts in SGD's steps."""
    goal, own = goals(sgd)[part], set(seeds(runs))
    # the same seeds, for data and first models differ by seed
    base = float(np.median([steps_to(line, goal) for line in sgd if line["seed"] in own]))
    steps = np.array([steps_to(line, goal) for line in runs])
    return RaceGain(steps, base / steps, base / (cost["start"] + cost["price"] * steps))
