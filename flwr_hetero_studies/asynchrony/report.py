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
COSTS = ("virtual_s", "bytes", "device_s")
HEAD = ["setting", "sooner, newest", "sooner, averaged", "than FedAvg averaged", "bytes",
        "device-seconds", "newest ends", "averaged ends"]  # fmt: skip
DRAWN = ("FedAvg", *(name + AVERAGED for name in ("FedAvg", "all, fair", "3, fair")))
Reached = Mapping[int, Mapping[str, float] | None]
"""What the target took, by seed; None where it was not reached."""


def views(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Give each setting two views: its newest model and the average of the last ones."""
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
    return {key: float(column(line, key)[int(place)]) for key in COSTS}


def ratios(own: Reached, base: Reached, key: str) -> list[float]:
    """Return one run's cost over another's for the seeds in which both reached the target."""
    both = [(mine, its) for s, mine in own.items() if mine and (its := base.get(s))]
    return [mine[key] / its[key] for mine, its in both]


def sooner(base: Reached, own: Reached) -> str:
    found = ratios(base, own, "virtual_s")
    missed = len(own) - len(found)
    if not found:
        return "never"
    return tables.extent(found, "{:.1f}") + (f", {missed} of {len(own)} not" if missed else "")


def took(lines: Sequence[Line], base: Sequence[Line]) -> Reached:
    # each seed has its own target: FedAvg's end in it
    return {own["seed"]: reach(own, end(its) - MARGIN) for own, its in record.pairs(lines, base)}


def row(name: str, runs: Mapping[str, Sequence[Line]]) -> list[str]:
    base, second, newest, own = (
        took(runs[view], runs[BASE]) for view in (BASE, BASE + AVERAGED, name, name + AVERAGED)
    )
    means = [(ratios(second, own, "virtual_s"), ".1f")]
    means += [(ratios(own, base, key), ".2f") for key in COSTS[1:]]
    cells = [f"{mean(found):{form}}" if found else "" for found, form in means]
    for view in (name, name + AVERAGED):
        ends = (100 * mean(end(x, key) for x in runs[view]) for key in ("accuracy", "slow"))
        cells.append(" / ".join(f"{each:.1f}" for each in ends))
    return [name, sooner(base, newest), sooner(base, own), *cells]


def drawn(lines: Sequence[Line], name: str) -> tuple[Vector, Vector]:
    clocks = [column(line, "virtual_s") for line in lines]
    return curves.over_time(clocks, [100 * smooth(line, name) for line in lines])


def section(name: str, lines: list[Line]) -> str:
    runs = views(lines)
    names = [each for each in runs if not each.endswith(AVERAGED)]
    table = tables.table(HEAD, [row(each, runs) for each in names])
    return f"## {name}\n\n{len(record.seeds(lines))} seeds.\n\n{table}\n"


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    runs = views(next(iter(groups.values())))
    both = (("all classes", "accuracy"), ("the slow nodes' classes", "slow"))
    # runs of --fast may be too short to draw
    known = [n for n in DRAWN if n in runs and all(len(column(x, "slow")) for x in runs[n])]
    panels = {title: {name: drawn(runs[name], key) for name in known} for title, key in both}
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, folder / "curves.png", *labels, xscale="log")
    sections = "".join(section(name, own) for name, own in groups.items())
    return {**lines[0]["case"], "sections": sections, "software": record.software(lines)}
