"""Training curves: means over seeds, best learning rates, steps and time to a loss."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Line = dict[str, Any]
DEFAULT = "stochastic"
"""The package's default among the methods."""
PARTS = (0.2, 0.5, 0.9)
"""Of SGD's runs: their mean losses there are the targets."""
LAST = 3
"""Points whose mean is the final loss: single ones jump."""


def by(lines: Sequence[Line], *names: str) -> dict[Any, list[Line]]:
    """Group lines by the values of some keys, in order of appearance."""
    groups: dict[Any, list[Line]] = defaultdict(list)
    for line in lines:
        values = tuple(line[name] for name in names)
        groups[values if len(values) > 1 else values[0]].append(line)
    return dict(groups)


def falling(losses: Sequence[float]) -> NDArray[np.float64]:
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


def fit(line: Line) -> NDArray[np.float64]:
    """Fall of the loss over a run; infinite from a divergence on."""
    losses = np.nan_to_num([point["loss"] for point in line["curve"]] or [np.inf], nan=np.inf)
    whole = int(np.isfinite(losses).sum()) if np.isinf(losses).any() else len(losses)
    return np.concatenate([falling(losses[:whole]), losses[whole:]])


def end_of(line: Line) -> float:
    """Return the mean of the last points, infinite if the run did not come to its end."""
    whole = line["curve"] and line["curve"][-1]["iteration"] == line["iterations"]
    losses = [point["loss"] for point in line["curve"][-LAST:]]
    return float(np.nan_to_num(losses, nan=np.inf).mean()) if whole else np.inf


def best_rate(lines: Sequence[Line]) -> float | None:
    """Name the learning rate of the least final loss with the first seed."""
    first = [line for line in lines if line["seed"] == 0]
    return float(min(first, key=end_of)["lr"]) if first else None


def chosen(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Keep each method's runs of a race at one learning rate.

    The unbiased rules are SGD with other draws: they take SGD's own best rate. The others take
    theirs.
    """
    methods = by(lines, "method")
    base = best_rate(methods["SGD"])
    rates = {m: base if is_unbiased(m) else best_rate(runs) for m, runs in methods.items()}
    return {m: [r for r in runs if r["lr"] == rates[m]] for m, runs in methods.items()}


def is_unbiased(method: str) -> bool:
    """Whether a method is not tuned, but runs at SGD's learning rate."""
    return method.startswith("stochastic")


def mean_curve(runs: Sequence[Line]) -> dict[str, list[float]]:
    """Mean over seeds, as far as all of them go."""
    length = min(len(line["curve"]) for line in runs)
    names = ("iteration", "seconds", "loss", "accuracy")
    return {
        name: [float(np.mean([line["curve"][i][name] for line in runs])) for i in range(length)]
        for name in names
    }


def goals(sgd: Sequence[Line]) -> list[float]:
    """Take the mean loss of SGD's runs at some parts of them."""
    mean = np.mean([fit(line) for line in sgd], axis=0)
    return [float(np.interp(part * (len(mean) - 1), np.arange(len(mean)), mean)) for part in PARTS]


def reached(line: Line, goal: float) -> float:
    """Count steps to a loss, between points by a straight line; infinite if never."""
    losses, steps = fit(line), [point["iteration"] for point in line["curve"]]
    there = np.flatnonzero(losses <= goal)
    if not there.size:
        return float("inf")
    i = int(there[0])
    if i == 0 or not np.isfinite(losses[i - 1]):
        return float(steps[i])
    part = (losses[i - 1] - goal) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + part * (steps[i] - steps[i - 1]))


class Gain(NamedTuple):
    """What a method gains over SGD's median on the way to a mean loss of that, seed by seed.

    Steps are infinite and gains 0 where a seed never gets there.
    """

    steps: NDArray[np.float64]
    in_steps: NDArray[np.float64]
    in_time: NDArray[np.float64]

    def tell(self) -> list[str]:
        """Give the steps with their gain, and the gain in time with its range."""
        missing = int(np.isinf(self.steps).sum())
        if 2 * missing >= len(self.steps):
            return [f"never in {missing} of {len(self.steps)}", ""]
        least = "never" if missing else f"{self.in_time.min():.2f}"
        spread = f" ({least} to {self.in_time.max():.2f})" if len(self.steps) > 1 else ""
        return [
            f"{np.median(self.steps):.0f} ({np.median(self.in_steps):.2f}x)",
            f"{np.median(self.in_time):.2f}x{spread}",
        ]

    def brief(self) -> str:
        """Give the median gain in time."""
        median = float(np.median(self.in_time))
        return f"{median:.2f}" if median > 0 else "never"


def gain(runs: Sequence[Line], sgd: Sequence[Line], part: int, price: Line) -> Gain:
    """Compare runs with the median of SGD's; time counts in SGD's steps."""
    goal = goals(sgd)[part]
    seeds = {line["seed"] for line in runs}
    base = float(np.median([reached(line, goal) for line in sgd if line["seed"] in seeds]))
    steps = np.array([reached(line, goal) for line in runs])
    times = price["start"] + time_of(steps, price, sgd[0]["iterations"])
    return Gain(steps, base / steps, base / times)


def time_of(steps: NDArray[np.float64], price: Line, iterations: int) -> NDArray[np.float64]:
    """Time of so many steps; of the default by the quarter of the run, for its gate may open."""
    if price["method"] != DEFAULT:
        return float(price["price"]) * steps
    spent = iterations / 4 * np.cumsum([0.0, *price["quarters"]])
    found = np.interp(steps, np.linspace(0.0, iterations, 5), spent)
    return np.where(np.isinf(steps), np.inf, found)


def final_loss(runs: Sequence[Line]) -> str:
    """Mean over seeds of the final loss, with the standard deviation if there are several."""
    ends = [end_of(line) for line in runs]
    if broken := int(np.isinf(ends).sum()):
        return f"diverged in {broken} of {len(ends)}"
    spread = f" ± {np.std(ends, ddof=1):.4f}" if len(ends) > 1 else ""
    return f"{np.mean(ends):.4f}{spread}"


def seeds_of(runs: Sequence[Line]) -> str:
    """Count the seeds of some runs."""
    count = len({line["seed"] for line in runs})
    return f"{count} seed" if count == 1 else f"{count} seeds"
