"""Training curves: means over seeds, best learning rates, steps and time to a loss."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Line = dict[str, Any]
PARTS = (0.2, 0.5, 0.9)
"""Of SGD's run: the losses it has reached there are the targets."""
SMOOTH = 3
"""Points whose mean loss counts: single ones jump."""


def by(lines: Sequence[Line], *names: str) -> dict[Any, list[Line]]:
    """Group lines by the values of some keys, in order of appearance."""
    groups: dict[Any, list[Line]] = defaultdict(list)
    for line in lines:
        values = tuple(line[name] for name in names)
        groups[values if len(values) > 1 else values[0]].append(line)
    return dict(groups)


def smooth(line: Line) -> NDArray[np.float64]:
    """Mean loss of each point and those just before it; infinite after a divergence."""
    losses = [point["loss"] for point in line["curve"]] or [np.inf]
    losses = np.nan_to_num(losses, nan=np.inf, posinf=np.inf)
    return np.array([losses[max(0, i - SMOOTH + 1) : i + 1].mean() for i in range(len(losses))])


def end_of(line: Line) -> float:
    """Return the final loss, infinite if the run did not come to its end."""
    whole = line["curve"] and line["curve"][-1]["iteration"] == line["iterations"]
    return float(smooth(line)[-1]) if whole else np.inf


def chosen(lines: Sequence[Line]) -> list[Line]:
    """Keep the runs at the learning rate of the least final loss with the first seed."""
    first = [line for line in lines if line["seed"] == 0]
    best = min(first, key=end_of)["lr"] if first else None
    return [line for line in lines if line["lr"] == best]


def mean_curve(runs: Sequence[Line]) -> dict[str, list[float]]:
    """Mean over seeds, as far as all of them go."""
    length = min(len(line["curve"]) for line in runs)
    names = ("iteration", "seconds", "loss", "accuracy")
    return {
        name: [float(np.mean([line["curve"][i][name] for line in runs])) for i in range(length)]
        for name in names
    }


def goals(sgd: Line) -> list[float]:
    """Take the least losses that SGD has seen at some parts of its run."""
    curve = np.minimum.accumulate(smooth(sgd))
    return [float(curve[round(part * (len(curve) - 1))]) for part in PARTS]


def reached(line: Line, goal: float) -> float:
    """Count steps to a loss, between points by a straight line; NaN if it is never reached."""
    losses = smooth(line)
    there = np.flatnonzero(losses <= goal)
    if not there.size:
        return float("nan")
    i, steps = there[0], [point["iteration"] for point in line["curve"]]
    if i == 0 or losses[i] == losses[i - 1]:
        return float(steps[i])
    part = (losses[i - 1] - goal) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + part * (steps[i] - steps[i - 1]))


class Gain(NamedTuple):
    """What a method gains over SGD on the way to a loss that SGD has reached, seed by seed."""

    steps: list[float]
    in_steps: list[float]
    in_time: list[float]

    def tell(self) -> list[str]:
        """Give the steps with their gain, and the gain in time with its range."""
        missing = sum(np.isnan(self.steps))
        if missing:
            return [f"never in {missing} of {len(self.steps)}", ""]
        spread = f"({min(self.in_time):.2f} to {max(self.in_time):.2f})"
        return [
            f"{np.median(self.steps):.0f} ({np.median(self.in_steps):.2f}x)",
            f"{np.median(self.in_time):.2f}x {spread}",
        ]


def gain(runs: Sequence[Line], sgd: Sequence[Line], part: int, price: Line) -> Gain:
    """Compare the runs with SGD's of the same seeds; time counts in SGD's steps."""
    rivals = {line["seed"]: line for line in sgd}
    pairs = [(line, rivals[line["seed"]]) for line in runs if line["seed"] in rivals]
    steps, base = [], []
    for line, rival in pairs:
        goal = goals(rival)[part]
        steps.append(reached(line, goal))
        base.append(reached(rival, goal))
    times = [price["start"] + price["price"] * count for count in steps]
    return Gain(
        steps,
        [b / max(s, 1e-9) for b, s in zip(base, steps, strict=True)],
        [b / max(t, 1e-9) for b, t in zip(base, times, strict=True)],
    )


def final_loss(runs: Sequence[Line]) -> str:
    """Mean and spread over seeds of the final loss."""
    ends = [end_of(line) for line in runs]
    broken = int(np.isinf(ends).sum())
    if broken:
        return f"diverged in {broken} of {len(ends)}"
    return f"{np.mean(ends):.4f} ± {np.std(ends):.4f}"
