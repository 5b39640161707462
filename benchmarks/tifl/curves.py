"""Accuracy against virtual time: smoothing, means over seeds, time to target."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Line = dict[str, Any]
SMOOTH = 5
"""Rounds whose mean accuracy is taken: single rounds on uneven data jump."""
FINAL = 10
"""Last rounds whose mean accuracy counts as final."""
TOLERANCE = 0.01
"""One point below vanilla's final accuracy counts as reached."""
STEPS = 4001


def read_lines(path: Path) -> list[Line]:
    """Read json lines; none if the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def final_accuracy(lines: Sequence[Line]) -> float:
    """Mean accuracy of the last rounds, over all seeds."""
    return float(np.mean([np.mean(line["accuracy"][-FINAL:]) for line in lines]))


def smooth(accuracy: Sequence[float]) -> NDArray[np.float64]:
    """Mean of each round and those just before it."""
    figures = np.asarray(accuracy)
    return np.array([figures[max(0, i - SMOOTH + 1) : i + 1].mean() for i in range(len(figures))])


def mean_curve(
    lines: Sequence[Line], unit_s: dict[int, float], *, profiling: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean over seeds of smoothed accuracy against time, each seed in its own unit of time.

    Between two rounds the figure of the first holds. The curve is NaN where not every seed has
    a figure: before its first round or after its last.
    """
    time = np.linspace(0, 1, STEPS)
    curves = []
    for line in lines:
        shift_s = line["profiling_s"] if profiling else 0.0
        clock = (np.asarray(line["clock_s"]) + shift_s) / unit_s[line["seed"]]
        latest = np.searchsorted(clock, time, side="right") - 1
        known = (latest >= 0) & (time <= clock[-1])
        curves.append(np.where(known, smooth(line["accuracy"])[latest], np.nan))
    return time, np.mean(curves, axis=0)


def time_to(target: float, time: NDArray[np.float64], curve: NDArray[np.float64]) -> float:
    """First time at which the curve is at the target; NaN if never."""
    reached = np.flatnonzero(curve >= target)
    return float(time[reached[0]]) if len(reached) else float("nan")


def lengths(lines: Sequence[Line]) -> dict[int, float]:
    """Virtual seconds of each seed's run."""
    return {line["seed"]: line["clock_s"][-1] for line in lines}
