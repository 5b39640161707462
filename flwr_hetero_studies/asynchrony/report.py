"""Time, bytes and device-seconds to FedAvg's accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line

BASE, AVERAGED = "FedAvg", ", averaged"
MARGIN, LAST, WINDOW = 0.01, 10, 5
COSTS = {"bytes": "bytes", "device_s": "device-seconds"}
HEAD = ["setting", "sooner than FedAvg", "than FedAvg, averaged", "s to the target",
        *COSTS.values(), "end: all", "end: last two"]  # fmt: skip
DRAWN = ("FedAvg", *(name + AVERAGED for name in ("FedAvg", "all, fair", "3, fair")))


def views(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Give each setting two rows: its newest model and the average of the last ones."""
    found: dict[str, list[Line]] = {}
    for name, own in record.by(lines, "name").items():
        found[name] = []
        for line in own:
            newest = {"accuracy": line["curve"]["newest"], "slow": line["curve"]["newest_slow"]}
            found[name].append(line | {"curve": line["curve"] | newest})
        found[name + AVERAGED] = own
    return found


def smooth(line: Line, name: str) -> Vector:
    """Average each value with the four before it; the first four have no such mean."""
    return curves.smooth(line["curve"][name], WINDOW, whole=True)


def column(line: Line, name: str) -> Vector:
    return np.asarray(line["curve"][name], float)[WINDOW - 1 :]


def end(line: Line, name: str = "accuracy") -> float:
    return curves.last(line, name, LAST)


def reach(line: Line, target: float) -> dict[str, float] | None:
    """Return what the target took; None if it was not reached."""
    place = curves.reached(smooth(line, "accuracy"), target)
    if np.isnan(place):
        return None
    return {key: float(column(line, key)[int(place)]) for key in ("virtual_s", *COSTS)}


def row(name: str, lines: Sequence[Line], runs: Mapping[str, Sequence[Line]]) -> list[str]:
    averaged, found = record.by_seed(runs[BASE + AVERAGED]), []
    for line, base in record.pairs(lines, runs[BASE]):
        # each seed has its own target: FedAvg's end in it
        target = end(base) - MARGIN
        own, theirs = reach(line, target), reach(base, target)
        if own is not None and theirs is not None:
            found.append((own, theirs, reach(averaged[line["seed"]], target)))
    ends = [f"{100 * mean(end(line, key) for line in lines):.1f}" for key in ("accuracy", "slow")]
    missed = len(lines) - len(found)
    text = f"; {missed} of {len(lines)} not" if missed else ""
    # a mean over no run is no figure
    if not found:
        return [name, f"not reached in {missed} of {len(lines)}", *[""] * 4, *ends]
    speed = [theirs["virtual_s"] / own["virtual_s"] for own, theirs, _ in found]
    second = [its["virtual_s"] / own["virtual_s"] for own, _, its in found if its is not None]
    shares = [tables.extent([own[key] / theirs[key] for own, theirs, _ in found]) for key in COSTS]
    seconds = tables.extent([own["virtual_s"] for own, *_ in found], "{:.1f}")
    speeds = [tables.extent(speed, "{:.1f}x") + text, tables.extent(second, "{:.1f}x")]
    return [name, *speeds, seconds, *shares, *ends]


def drawn(lines: Sequence[Line], name: str) -> tuple[Vector, Vector]:
    clocks = [column(line, "virtual_s") for line in lines]
    return curves.over_time(clocks, [100 * smooth(line, name) for line in lines])


def section(name: str, lines: list[Line]) -> str:
    runs = views(lines)
    counts = {each: len(own) for each, own in record.by(lines, "name").items()}
    seeds = ", ".join(f"{each}: {count}" for each, count in counts.items())
    table = tables.table(HEAD, [row(each, own, runs) for each, own in runs.items()])
    return f"## {name}\n\nSeeds: {seeds}; {record.software(lines)}.\n\n{table}\n"


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    runs = views(next(iter(groups.values())))
    both = (("all classes", "accuracy"), ("the slow nodes' classes", "slow"))
    known = [name for name in DRAWN if name in runs]
    panels = {title: {name: drawn(runs[name], key) for name in known} for title, key in both}
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, folder / "curves.png", *labels, xscale="log")
    sections = [section(name, own) for name, own in groups.items()]
    return {**lines[0]["case"], "sections": "".join(sections)}
