"""Costs to FedAvg's accuracy, as shares of FedAvg's own."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.tables import Line

BASE, WHOLE = "FedAvg", "all five"
MARGIN, LAST, WINDOW = 0.01, 10, 5
COSTS = {"virtual_s": "virtual time", "round": "rounds", "bytes": "bytes",
         "device_s": "device-seconds"}  # fmt: skip
HEAD = ["setting", "faster", *COSTS.values(), "final accuracy",
        "rounds made, share of FedAvg's time"]  # fmt: skip
DRAWN = ("FedAvg", "FedNova", "TiFL", "biased local SGD", "CD-GraB", "all five")
Base = Mapping[int, Line]


def final(line: Line) -> float:
    return mean(line["curve"]["accuracy"][-LAST:])


def cost_to(line: Line, target: float) -> dict[str, float] | None:
    """Return what it took to reach an accuracy; None if it was not reached."""
    place = tables.reached(tables.smooth(line["curve"]["accuracy"], WINDOW), target)
    if np.isnan(place):
        return None
    return {key: tables.at(line["curve"][key], place) for key in COSTS}


def shares_of(lines: list[Line], base: Base) -> list[dict[str, float]]:
    """Return costs to the target as shares of FedAvg's, for the seeds that get there."""
    found = []
    for line, its in tables.pairs(lines, base.values()):
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
    speed = [1 / share["virtual_s"] for share in shares]
    cells = [tables.extent([share[key] for share in shares]) if shares else "" for key in COSTS]
    faster = tables.extent(speed, "{:.1f}x") if shares else "none"
    points = [100 * final(line) for line in lines]
    deviation = f" ± {stdev(points):.1f}" if len(points) > 1 else ""
    ends = [
        [one["curve"]["virtual_s"][-1] for one in p] for p in tables.pairs(lines, base.values())
    ]
    rounds, used = len(lines[0]["curve"]["accuracy"]) - 1, mean(own / its for own, its in ends)
    end = f"{mean(points):.1f}{deviation} %"
    return [name, faster + missed(lines, base), *cells, end, f"{rounds}, {100 * used:.0f} %"]


def gain(lines: list[Line], base: Base) -> str:
    """Say how much sooner than FedAvg the target is reached."""
    shares, miss = shares_of(lines, base), missed(lines, base)
    text = f"{mean(1 / share['virtual_s'] for share in shares):.1f} times" if shares else "never"
    return text + (f" ({miss[2:]} within its rounds)" if miss else "")


def reading(runs: Mapping[str, list[Line]], base: Base) -> str:
    """Say what each part contributes to the whole."""
    if WHOLE not in runs:
        return ""
    whole = mean(map(final, runs[WHOLE]))
    above = 100 * (whole - mean(map(final, base.values())))
    text = (
        f"All five reach the target {gain(runs[WHOLE], base)} sooner than FedAvg; the end is "
        f"{above:+.1f} points from FedAvg's.\n"
    )
    for name in (name for name in runs if name.startswith("all but ")):
        points = 100 * (mean(map(final, runs[name])) - whole)
        text += (
            f"Without {name.removeprefix('all but ')} it is {gain(runs[name], base)}, and the end "
            f"{points:+.1f} points from that of all five.\n"
        )
    return text + "\n"


def mean_curve(lines: list[Line], end_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return smoothed accuracy against virtual time, mean over seeds."""
    clocks = [line["curve"]["virtual_s"] for line in lines]
    values = [tables.smooth(line["curve"]["accuracy"], WINDOW) for line in lines]
    grid_s = np.linspace(0, min([end_s, *(clock[-1] for clock in clocks)]), 300)
    curves = [np.interp(grid_s, *pair) for pair in zip(clocks, values, strict=True)]
    return grid_s, 100 * np.mean(curves, axis=0)


def section(name: str, lines: list[Line], folder: Path) -> str:
    """Write one data set's part of the page and draw its figure."""
    runs = tables.by(lines, "name")
    base, case = tables.by_seed(runs[BASE]), lines[0]["case"]
    end_s = min(line["curve"]["virtual_s"][-1] for line in runs[BASE])
    drawn = {each: mean_curve(runs[each], end_s) for each in DRAWN if each in runs}
    labels = ("virtual time in seconds, profiling included", "test accuracy in %")
    tables.draw({name: drawn}, folder / f"{name}.png", *labels, size=(7.5, 4.0))
    minutes = sum(tables.metric(lines, "took_s")) / 60
    return (
        f"## {name}\n\n{case['train-examples']} training and {case['train-examples'] // 3} test "
        f"examples, learning rate {case['learning-rate']}, {len(tables.seeds(lines))} seeds; "
        f"{tables.software(lines)}. The runs took {minutes:.0f} minutes one after the other, on a "
        f"busy machine.\n\n{tables.table(HEAD, [row(n, own, base) for n, own in runs.items()])}\n"
        f"{reading(runs, base)}![Accuracy against virtual time]({name}.png)\n\n"
    )


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw the figures."""
    groups = tables.by(lines, "experiment")
    sections = [section(name, own, folder) for name, own in groups.items()]
    return lines[0]["case"] | {"sections": "".join(sections)}
