"""Costs to FedAvg's accuracy, as shares of FedAvg's own."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from benchmarks.tables import (
    Line,
    at,
    by,
    by_seed,
    draw,
    extent,
    metric,
    pairs,
    reached,
    read,
    seeds,
    smooth,
    software,
    table,
)

BASE, WHOLE = "FedAvg", "all five"
MARGIN, LAST, WINDOW = 0.01, 10, 5
COSTS = {"virtual_s": "virtual time", "round": "rounds", "bytes": "bytes",
         "device_s": "device-seconds"}  # fmt: skip
DRAWN = ("FedAvg", "FedNova", "TiFL", "biased local SGD", "CD-GraB", "all five")
HEAD = """# One fleet, all five

20 nodes with CPU shares 4, 2, 1, 0.5 and 0.1 (`paper-5`), labels partitioned by Dirichlet(0.5), 3
nodes a round, small CNN, the same learning rate for all, not tuned for any. FedAvg trains {rounds}
rounds. The others end when they have used as much virtual time or {most} times as many rounds,
whichever comes first. The settings with steps by speed end by their rounds, long before FedAvg's
time is up (last column): what they would reach in the rest of it is not measured.

The target is FedAvg's final accuracy (mean of its last {last} rounds) less one point, for each
seed by itself; it is reached when the mean of {window} rounds is there. Costs to the target are
shares of FedAvg's own: mean over the seeds that get there, lowest and highest in brackets.
Device-seconds, the proxy for energy, add up the time that nodes worked. TiFL's profiling counts as
time. Where the number of seeds that do not get there within their rounds is named, the means are
over the others alone.
"""
Base = Mapping[int, Line]


def final(line: Line) -> float:
    return mean(line["curve"]["accuracy"][-LAST:])


def cost_to(line: Line, target: float) -> dict[str, float] | None:
    """Return what it took to reach an accuracy; None if it was not reached."""
    place = reached(smooth(line["curve"]["accuracy"], WINDOW), target)
    return None if np.isnan(place) else {key: at(line["curve"][key], place) for key in COSTS}


def shares_of(lines: list[Line], base: Base) -> list[dict[str, float]]:
    """Return costs to the target as shares of FedAvg's, for the seeds that get there."""
    found = []
    for line, its in pairs(lines, base.values()):
        own, theirs = (cost_to(run, final(its) - MARGIN) for run in (line, its))
        if own is not None and theirs is not None:
            found.append({key: own[key] / theirs[key] for key in COSTS})
    return found


def missed(lines: list[Line], base: Base) -> str:
    """Say how many seeds do not get there, if any."""
    number = len(lines) - len(shares_of(lines, base))
    return f"; {number} of {len(lines)} not" if number else ""


def row(name: str, lines: list[Line], base: Base) -> list[str]:
    """One setting: its costs to the target, and where it ends."""
    shares = shares_of(lines, base)
    faster = extent([1 / share["virtual_s"] for share in shares], "{:.1f}x") if shares else "none"
    cells = [name, faster + missed(lines, base)]
    cells += [extent([share[key] for share in shares]) if shares else "" for key in COSTS]
    points = [100 * final(line) for line in lines]
    deviation = f" ± {stdev(points):.1f}" if len(points) > 1 else ""
    used = [
        line["curve"]["virtual_s"][-1] / its["curve"]["virtual_s"][-1]
        for line, its in pairs(lines, base.values())
    ]
    rounds = len(lines[0]["curve"]["accuracy"]) - 1
    return [*cells, f"{mean(points):.1f}{deviation} %", f"{rounds}, {100 * mean(used):.0f} %"]


def gain(lines: list[Line], base: Base) -> str:
    """Say how much sooner than FedAvg the target is reached."""
    shares = shares_of(lines, base)
    text = f"{mean(1 / share['virtual_s'] for share in shares):.1f} times" if shares else "never"
    return text + (f" ({missed(lines, base)[2:]} within its rounds)" if missed(lines, base) else "")


def reading(runs: Mapping[str, list[Line]], base: Base) -> str:
    """Say what each part contributes to the whole."""
    whole = runs.get(WHOLE)
    if not whole:
        return ""
    above = 100 * (mean(map(final, whole)) - mean(map(final, base.values())))
    text = (
        f"All five reach the target {gain(whole, base)} sooner than FedAvg; the end is "
        f"{above:+.1f} points from FedAvg's.\n"
    )
    for name in (name for name in runs if name.startswith("all but ")):
        points = 100 * (mean(map(final, runs[name])) - mean(map(final, whole)))
        text += (
            f"Without {name.removeprefix('all but ')} it is {gain(runs[name], base)}, and the end "
            f"{points:+.1f} points from that of all five.\n"
        )
    return text + "\n"


def mean_curve(lines: list[Line], end_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return smoothed accuracy against virtual time, mean over seeds."""
    end_s = min([end_s, *(line["curve"]["virtual_s"][-1] for line in lines)])
    grid_s = np.linspace(0, end_s, 300)
    curves = [
        np.interp(grid_s, line["curve"]["virtual_s"], smooth(line["curve"]["accuracy"], WINDOW))
        for line in lines
    ]
    return grid_s, 100 * np.mean(curves, axis=0)


def section(name: str, lines: list[Line], folder: Path) -> str:
    """Write one data set's part of the page and draw its figure."""
    runs = by(lines, "name")
    if BASE not in runs:
        return ""
    base, case = by_seed(runs[BASE]), lines[0]["case"]
    end_s = min(line["curve"]["virtual_s"][-1] for line in runs[BASE])
    drawn = {each: mean_curve(runs[each], end_s) for each in DRAWN if each in runs}
    labels = ("virtual time in seconds, profiling included", "test accuracy in %")
    draw({name: drawn}, folder / f"{name}.png", *labels, size=(7.5, 4.0))
    head = ["setting", "faster", *COSTS.values(), "final accuracy",
            "rounds made, share of FedAvg's time"]  # fmt: skip
    return (
        f"## {name}\n\n{case['train-examples']} training and {case['train-examples'] // 3} test "
        f"examples, learning rate {case['learning-rate']}, {len(seeds(lines))} seeds; "
        f"{software(lines)}. The runs took {sum(metric(lines, 'took_s')) / 60:.0f} minutes one "
        f"after the other, on a busy machine.\n\n"
        + table(head, [row(each, own, base) for each, own in runs.items()])
        + f"\n{reading(runs, base)}![Accuracy against virtual time]({name}.png)\n\n"
    )


def report(folder: Path) -> str:
    """Make the page and the figures from a folder's results."""
    lines = read(folder)
    text = HEAD.format(**lines[0]["case"], last=LAST, window=WINDOW)
    text += "\n`python -m benchmarks.bench headline --data DIR`, once per data set.\n\n"
    return text + "".join(section(n, own, folder) for n, own in by(lines, "experiment").items())
