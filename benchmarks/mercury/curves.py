"""What a run's curve says: when it reached a target, what it gained, where it ends."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

HERE = Path(__file__).parent
Line = dict[str, Any]
Cell = tuple[Any, ...]

SMOOTHING = 9
"""Points of a curve that are averaged before a target counts as reached."""
DROPS = (0.005, 0.01, 0.02, 0.04)
"""Targets: uniform sampling's own end accuracy in the same seed, less this; the first counts."""


def read(name: str) -> list[Line]:
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def smooth(line: Line) -> np.ndarray:
    """Return the accuracies of a curve, each averaged with its neighbours."""
    values = np.array(line["curve"]["accuracy"])
    half = SMOOTHING // 2
    return np.convolve(np.pad(values, half, "edge"), np.ones(SMOOTHING) / SMOOTHING, "valid")


def end_accuracy(line: Line) -> float:
    """Return what a run holds at its end: the mean of its last nine measurements."""
    return float(np.mean(line["curve"]["accuracy"][-SMOOTHING:]))


def reached(line: Line, target: float, clock: str) -> float:
    """Return when a run reached a target, interpolated between two measurements; NaN if never."""
    values = smooth(line)
    hits = np.flatnonzero(values >= target)
    if not len(hits):
        return float("nan")
    at = int(hits[0])
    times = line["curve"][clock]
    if at == 0:
        return float(times[0])
    part = (target - values[at - 1]) / (values[at] - values[at - 1])
    return float(times[at - 1] + part * (times[at] - times[at - 1]))


def gain(line: Line, base: Line, drop: float) -> float:
    """Return uniform's seconds over this run's; a target never reached counts as at the end."""
    target = end_accuracy(base) - drop
    seconds = reached(line, target, "virtual_s")
    seconds = seconds if np.isfinite(seconds) else line["curve"]["virtual_s"][-1]
    return reached(base, target, "virtual_s") / seconds


def pooled_gain(line: Line, base: Line) -> float:
    """Return the geometric mean of the gains at all targets."""
    return float(np.exp(np.mean([np.log(gain(line, base, drop)) for drop in DROPS])))


def cell_of(line: Line) -> Cell:
    """Return what a run shares with those it is compared with."""
    split = "IID" if line["partition"] == "iid" else f"Dirichlet {line['alpha']:g}"
    told = (line["data"], line["rows"], line["model"], line["batch-size"], line["learning-rate"])
    return (int(line["fleet"].removeprefix("wifi-")), split, line["nodes"], *told)


def cells(lines: list[Line]) -> dict[Cell, dict[str, list[Line]]]:
    """Sort runs by cell and method."""
    found: dict[Cell, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in sorted(lines, key=lambda line: line["seed"]):
        found[cell_of(line)][line["method"]].append(line)
    return found


def compared(runs: list[Line], base: list[Line]) -> list[tuple[Line, Line]]:
    """Pair runs with uniform sampling's of the same seed."""
    by_seed = {line["seed"]: line for line in base}
    return [(line, by_seed[line["seed"]]) for line in runs if line["seed"] in by_seed]


def spread(values: list[float], form: str = ".3g") -> str:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "never"
    text = f"{mean(known):{form}}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")
    missed = len(values) - len(known)
    return text + (f" ({missed} of {len(values)} never)" if missed else "")


def mean_gain(methods: dict[str, list[Line]], name: str) -> str:
    pairs = compared(methods[name], methods["uniform"])
    return f"{mean(pooled_gain(*pair) for pair in pairs):.2f}x"


def moment_ratio(runs: list[Line], part: float) -> str:
    """Return the mean over seeds of the gate's measured ratio at a part of a run."""
    ratios = [line["curve"]["variance-ratio"] for line in runs]
    return f"{mean(values[round(part * (len(values) - 1))] for values in ratios):.2f}"
