"""Turn the results beside this file into ``report.md`` and ``curves.png``; never trains.

Usage: ``python benchmarks/mercury/report.py``.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
Line = dict[str, Any]

SMOOTHING = 3
"""Points of a curve that are averaged before a target counts as reached."""
PAPER = {
    "bandwidths": "3.74x at 10 Mbit/s, less at higher bandwidth; CIFAR-10, ResNet-18 (Figure 11)",
    "alphas": "2.75x, 2.5x, 2.41x for alpha = 10, 1, 0.5; groups, no overlap (Figure 18)",
    "nodes": "the same gain on 4, 8 and 12 devices (Figure 17)",
}
TITLES = {
    "bandwidths": ("Bandwidth", "4 nodes, IID data", ("fleet",)),
    "alphas": ("Unequal data", "12 nodes, 10 Mbit/s, Dirichlet", ("alpha",)),
    "nodes": ("Number of nodes", "50 Mbit/s, IID data", ("nodes",)),
    "rates": ("Learning rate", "4 nodes, 50 Mbit/s, IID data", ("learning-rate",)),
    "one step": ("A single step per round", "4 nodes, 10 Mbit/s, IID data", ("fleet",)),
    "knobs": ("Mixing and gate", "4 nodes, 50 Mbit/s, IID data", ("mixing", "gate")),
    "resharding": (
        "Resharding",
        "4 nodes, 50 Mbit/s, Dirichlet 0.1; RAW SAMPLES LEAVE THE DEVICES",
        ("resharding",),
    ),
}


def read(name: str) -> list[Line]:
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def smooth(line: Line) -> np.ndarray:
    """Return the accuracies of a curve, each averaged with its neighbours."""
    values = np.array([point["accuracy"] for point in line["curve"]])
    half = SMOOTHING // 2
    return np.convolve(np.pad(values, half, "edge"), np.ones(SMOOTHING) / SMOOTHING, "valid")


def reached(line: Line, target: float, clock: str) -> float:
    """Return when a run reached a target, interpolated between two measurements; NaN if never."""
    values = smooth(line)
    hits = np.flatnonzero(values >= target)
    if not len(hits):
        return float("nan")
    at = int(hits[0])
    times = [point[clock] for point in line["curve"]]
    if at == 0:
        return float(times[0])
    part = (target - values[at - 1]) / (values[at] - values[at - 1])
    return float(times[at - 1] + part * (times[at] - times[at - 1]))


def target_of(lines: Iterable[Line]) -> float:
    """Return the accuracy that uniform sampling holds at its end, less half a point."""
    ends = [smooth(line)[-5:].mean() for line in lines if line["method"] == "uniform"]
    return float(np.mean(ends)) - 0.005 if ends else float("nan")


def spread(values: list[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "never"
    text = f"{mean(known):.3g}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")
    missed = len(values) - len(known)
    return text + (f" ({missed} of {len(values)} never)" if missed else "")


def table(lines: list[Line], keys: tuple[str, ...]) -> list[str]:
    """Compare the methods of each cell with uniform sampling in the same cell and seed."""
    cells: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        cells[tuple(line.get(key) for key in keys)].append(line)
    rows = [
        f"| {' | '.join(keys)} | method | rounds to target | seconds to target | gain | "
        "end accuracy | importance on |",
        "|" + " --- |" * (len(keys) + 6),
    ]
    for cell, members in cells.items():
        target = target_of(members) if any(m["method"] == "uniform" for m in members) else None
        if target is None:
            target = target_of(lines)
        base = {m["seed"]: reached(m, target, "virtual_s") for m in members
                if m["method"] == "uniform"}  # fmt: skip
        for method in dict.fromkeys(m["method"] for m in members):
            own = [m for m in members if m["method"] == method]
            seconds = [reached(m, target, "virtual_s") for m in own]
            gains = [
                base[m["seed"]] / s for m, s in zip(own, seconds, strict=True) if m["seed"] in base
            ]
            ends = [float(smooth(m)[-5:].mean()) for m in own]
            rows.append(
                f"| {' | '.join(str(part) for part in cell)} | {method} | "
                f"{spread([reached(m, target, 'round') for m in own])} | {spread(seconds)} | "
                f"{spread(gains) if gains else ''} | "
                f"{100 * mean(ends):.2f} ± {100 * stdev(ends) if len(ends) > 1 else 0:.2f} % | "
                f"{100 * mean(m['open'] for m in own):.0f} % |"
            )
    return rows


def section(lines: list[Line], experiment: str) -> list[str]:
    own = [line for line in lines if line["experiment"] == experiment]
    if not own:
        return []
    title, setting, keys = TITLES[experiment]
    rows = 0 if own[0]["data"] == "digits" else own[0]["rows"]
    data = own[0]["data"] + (f", {rows} training images" if rows else "")
    text = [f"## {title}", "", f"{setting}; {data}; batch {own[0]['batch-size']}."]
    if experiment in PAPER:
        text.append(f"Paper: {PAPER[experiment]}.")
    return [*text, "", *table(own, keys), ""]


def estimator_section() -> list[str]:
    lines = read("estimators.jsonl")
    if not lines:
        return []
    rows = [
        f"| {line['estimator']} | {line['bias_percent']:+.2f} ± {line['error_percent']:.2f} % | "
        f"{line['variance_of_uniform']:.2f} |"
        for line in lines
    ]
    return [
        "## Bias and variance of the estimators",
        "",
        "Groups of 4, 10, 6, 20, 8 samples, batches of 8 from 2 groups, beta = 1; `estimators.py`.",
        "",
        "| estimator | bias of the mean gradient | variance, uniform = 1 |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


def overhead_section() -> list[str]:
    lines = read("overhead.jsonl")
    if not lines:
        return []
    rows = [
        f"| {line['case']} | {line['percent_of_step']} % | {line['lowest']} to {line['highest']} |"
        for line in lines
    ]
    return [
        "## Cost of the sampler itself",
        "",
        "`next_batch` plus `update`, as a share of a training step of the 28x28 CNN at batch 32.",
        "",
        "| case | median | range |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


def overlap_section() -> list[str]:
    lines = read("overlap.jsonl")
    if not lines:
        return []
    rows = [
        f"| {line['mbps']:g} | {line['free']['median_s']} | {line['bacc']['median_s']} | "
        f"{line['ratio']:.3f} |"
        for line in lines
    ]
    return [
        "## Overlap in a real deployment",
        "",
        "SuperLink and two SuperNodes on one machine, median seconds of a round.",
        "",
        "| Mbit/s | without scoring | scoring in the background | ratio |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def draw(lines: list[Line]) -> None:
    """Draw accuracy against virtual time, a panel per bandwidth, mean over seeds."""
    own = [line for line in lines if line["experiment"] == "bandwidths"]
    fleets = list(dict.fromkeys(line["fleet"] for line in own))
    if not fleets:
        return
    shown = ("uniform", "free", "bacc", "sequential", "bacc, paper", "adacomm")
    figure, axes = plt.subplots(1, len(fleets), figsize=(4.2 * len(fleets), 3.4), squeeze=False)
    for axis, fleet in zip(axes[0], fleets, strict=True):
        for method in shown:
            curves = [m for m in own if m["fleet"] == fleet and m["method"] == method]
            if curves:
                times = np.mean([[p["virtual_s"] for p in m["curve"]] for m in curves], axis=0)
                axis.plot(times, np.mean([smooth(m) for m in curves], axis=0), label=method)
        axis.set(title=fleet, xlabel="virtual time, s", ylabel="test accuracy")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=110)


def main() -> None:
    lines = read("results.jsonl")
    text = [
        "# Mercury: what it gains here",
        "",
        "Made by `report.py` from the files beside it. Time is virtual: devices and links are",
        "emulated (`wifi-*` fleets: compute and transfer in the ratio of the paper's ResNet-18 on",
        "Jetson TX1). The target is the accuracy that uniform sampling holds at its end, less half",
        "a point; gains are uniform's seconds over the method's in the same seed. Mean ± standard",
        "deviation over seeds.",
        "",
    ]
    for experiment in TITLES:
        text += section(lines, experiment)
    text += estimator_section() + overhead_section() + overlap_section()
    (HERE / "report.md").write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    draw(lines)


if __name__ == "__main__":
    main()
