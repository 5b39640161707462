"""Turn ``results.jsonl`` into ``report.md`` and ``headline.png``; never trains.

Usage: ``python benchmarks/headline/report.py [results.jsonl]``.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
BASE, MARGIN, LAST, WINDOW = "FedAvg", 0.01, 10, 5
COLUMNS = {
    "virtual_s": "virtual time",
    "rounds": "rounds",
    "bytes": "bytes",
    "device_s": "device-seconds",
}
DRAWN = ("FedAvg", "FedNova", "TiFL", "biased local SGD", "CD-GraB", "all five")
Line = dict[str, Any]


def smoothed(line: Line) -> np.ndarray:
    """Average the accuracy over the last rounds."""
    accuracy = np.array(line["accuracy"])
    sums = np.cumsum(np.insert(accuracy, 0, 0.0))
    ends = np.arange(1, len(accuracy) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def final(line: Line) -> float:
    return mean(line["accuracy"][-LAST:])


def cost_to(line: Line, target: float) -> dict[str, float] | None:
    """Find what it took to reach an accuracy; None if it was not reached."""
    reached = np.flatnonzero(smoothed(line) >= target)
    if not len(reached):
        return None
    at = int(reached[0])
    costs = {key: float(line[key][at]) for key in ("virtual_s", "bytes", "device_s")}
    return costs | {"rounds": float(at)}


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """Write a mean with its extremes."""
    text = form.format(mean(values))
    if len(values) == 1:
        return text
    return f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def row(name: str, lines: list[Line], base: dict[int, Line]) -> str:
    """One setting: shares of what FedAvg needs to the target, and the final accuracy."""
    cells = [name]
    shares: dict[str, list[float]] = defaultdict(list)
    missed = 0
    for line in lines:
        target = final(base[line["seed"]]) - MARGIN
        own, its = cost_to(line, target), cost_to(base[line["seed"]], target)
        if own is None or its is None:
            missed += 1
            continue
        for key in COLUMNS:
            shares[key].append(own[key] / its[key])
    note = f" ({missed} of {len(lines)} never)" if missed else ""
    for key in COLUMNS:
        if not shares[key]:
            cells.append("never")
        else:
            cells.append(spread(shares[key]) + (note if key == "virtual_s" else ""))
    faster = [1 / share for share in shares["virtual_s"]]
    cells.insert(1, spread(faster, "{:.1f}x") if faster else "-")
    points = [100 * final(line) for line in lines]
    deviation = f" ± {stdev(points):.1f}" if len(points) > 1 else ""
    cells.append(f"{mean(points):.1f}{deviation} %")
    return "| " + " | ".join(cells) + " |"


def gain(lines: list[Line], base: dict[int, Line]) -> float:
    """Average how much sooner than FedAvg the target is reached, where it is."""
    gains = []
    for line in lines:
        its = base[line["seed"]]
        own, theirs = (cost_to(run, final(its) - MARGIN) for run in (line, its))
        if own is not None and theirs is not None:
            gains.append(theirs["virtual_s"] / own["virtual_s"])
    return mean(gains) if gains else float("nan")


def reading(runs: dict[str, list[Line]], base: dict[int, Line]) -> list[str]:
    """Say what each part has in the whole."""
    whole, lines = runs["all five"], []
    lines.append(
        f"All five reach the target {gain(whole, base):.1f} times sooner than FedAvg and end "
        f"{100 * (mean(map(final, whole)) - mean(map(final, base.values()))):+.1f} points above it."
    )
    for name in (name for name in runs if name.startswith("all but ")):
        less = runs[name]
        points = 100 * (mean(map(final, less)) - mean(map(final, whole)))
        lines.append(
            f"Without {name.removeprefix('all but ')} it is {gain(less, base):.1f} times, and the "
            f"end {points:+.1f} points from that of all five."
        )
    lines.append(
        "Steps by speed save most of the time; tiers keep the accuracy that they would cost. With "
        "three seeds, differences below about a point and a quarter of the gain are chance."
    )
    return lines


def draw(runs: dict[str, list[Line]], path: Path) -> None:
    """Draw accuracy against virtual time, mean over seeds."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    end_s = min(line["virtual_s"][-1] for line in runs[BASE])
    grid_s = np.linspace(0, end_s, 300)
    for name in (name for name in DRAWN if name in runs):
        curves = [np.interp(grid_s, line["virtual_s"], smoothed(line)) for line in runs[name]]
        last_s = min(line["virtual_s"][-1] for line in runs[name])
        shown = grid_s <= last_s
        width = 2.2 if name in (BASE, "all five") else 1.2
        axes.plot(grid_s[shown], 100 * np.mean(curves, axis=0)[shown], label=name, lw=width)
    axes.set(xlabel="virtual time in seconds, profiling included", ylabel="test accuracy in %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl"
    lines = [json.loads(text) for text in source.read_text(encoding="utf-8").splitlines()]
    runs: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        runs[line["setting"]].append(line)
    base = {line["seed"]: line for line in runs[BASE]}
    first = lines[0]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    text = [
        "# One fleet, all five",
        "",
        "Made by `report.py` from the json lines beside it.",
        "",
        f"{first['dataset']}, {first['train_examples']} training examples dealt to 20 nodes by "
        "Dirichlet(0.5), CPU shares 4, 2,",
        "1, 0.5 and 0.1 (`paper-5`), 3 nodes a round, small CNN, "
        f"{len(base)} seeds; FedAvg trains {len(runs[BASE][0]['accuracy']) - 1} rounds.",
        "",
        "```bash",
        first["command"],
        "python benchmarks/headline/report.py",
        "```",
        "",
        f"Versions: {versions}.",
        "",
        f"The target is FedAvg's final accuracy (mean of its last {LAST} rounds) less one point, "
        "for each seed by",
        f"itself; it is reached when the mean of {WINDOW} rounds is there. Costs to the target are "
        "shares of FedAvg's own:",
        "mean over seeds, lowest and highest in brackets. Device-seconds, the proxy for energy, "
        "add up the time",
        "that nodes worked; TiFL's profiling counts as time. The final accuracy is that after at "
        "most FedAvg's",
        "whole time.",
        "",
        "| setting | faster | " + " | ".join(COLUMNS.values()) + " | final accuracy |",
        "| --- |" + " --- |" * (len(COLUMNS) + 2),
        *[row(name, own, base) for name, own in runs.items()],
        "",
        *reading(runs, base),
        "",
        "![Accuracy against virtual time](headline.png)",
        "",
    ]
    (source.parent / "report.md").write_text("\n".join(text), encoding="utf-8")
    draw(runs, source.parent / "headline.png")


if __name__ == "__main__":
    main()
