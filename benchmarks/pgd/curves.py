"""Training curves: means over seeds, best learning rates, iterations and time to a loss."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

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


def least(lines: Sequence[Line]) -> list[Line]:
    """Choose the learning rate of the least final loss, in the mean over seeds."""
    rates = by(lines, "lr")
    return min(rates.values(), key=lambda runs: np.mean([end_of(line) for line in runs]))


def mean_curve(runs: Sequence[Line]) -> dict[str, list[float]]:
    """Mean over seeds, as far as all of them go."""
    length = min(len(line["curve"]) for line in runs)
    names = ("iteration", "seconds", "loss", "accuracy")
    return {
        name: [float(np.mean([line["curve"][i][name] for line in runs])) for i in range(length)]
        for name in names
    }


def targets(sgd: Sequence[Line]) -> list[float]:
    """Take the mean losses of SGD at some parts of its run."""
    curves = [np.minimum.accumulate(smooth(line)) for line in sgd]
    mean = np.mean(curves, axis=0)
    return [float(mean[round(part * (len(mean) - 1))]) for part in PARTS]


def reached(line: Line, goal: float, clock: str) -> float:
    """Count iterations or seconds to a loss; NaN if it is never reached."""
    there = np.flatnonzero(smooth(line) <= goal)
    return float(line["curve"][there[0]][clock]) if there.size else float("nan")


def to_target(runs: Sequence[Line], sgd: Sequence[Line], goal: float, clock: str) -> str:
    """Say when a loss is reached (median over seeds) and the gain over SGD (worst to best)."""
    times = [reached(line, goal, clock) for line in runs]
    missing = int(np.isnan(times).sum())
    if missing:
        return f"never in {missing} of {len(times)}"
    base = {line["seed"]: reached(line, goal, clock) for line in sgd}
    gains = [base[line["seed"]] / max(time, 1e-9) for line, time in zip(runs, times, strict=True)]
    text = f"{np.median(times):.0f}" if clock == "iteration" else f"{np.median(times):.2f}"
    return f"{text} ({np.median(gains):.2f}x, {min(gains):.2f} to {max(gains):.2f})"


def final_loss(runs: Sequence[Line]) -> str:
    """Mean and spread over seeds of the final loss."""
    ends = [end_of(line) for line in runs]
    broken = int(np.isinf(ends).sum())
    if broken:
        return f"diverged in {broken} of {len(ends)}"
    return f"{np.mean(ends):.4f} ± {np.std(ends):.4f}"
