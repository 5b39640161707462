"""Accuracy on all classes and on the slow nodes' own, at the end and against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line

BASE, LAST, MARGIN = "FedAvg", 10, 0.02
HEAD = ["setting", "all classes", "last two", "last two, to FedAvg", "device-seconds",
        "virtual s"]  # fmt: skip


def ends(lines: Sequence[Line], name: str) -> list[float]:
    return [100 * curves.last(line, name, LAST) for line in lines]


def row(name: str, lines: Sequence[Line], base: Sequence[Line]) -> list[str]:
    """One setting, seed by seed beside FedAvg."""
    cells = [tables.extent(ends(lines, key), "{:.1f}") for key in ("accuracy", "slow")]
    costs = [f"{mean(x['curve'][key][-1] for x in lines):.0f}" for key in ("device_s", "virtual_s")]
    return [name, *cells, tables.extent(gaps(lines, base), "{:+.1f}"), *costs]


def losers(runs: Mapping[str, Sequence[Line]]) -> str:
    """Name the settings that lose more than the margin on the slow nodes' classes."""
    lost = [name for name, own in runs.items() if mean(gaps(own, runs[BASE])) < -100 * MARGIN]
    return ", ".join(lost) or "none"


def gaps(lines: Sequence[Line], base: Sequence[Line]) -> list[float]:
    """Return the points above FedAvg on the slow nodes' classes, seed by seed."""
    pairs = record.pairs(lines, base)
    return [ends([own], "slow")[0] - ends([its], "slow")[0] for own, its in pairs]


def curve(lines: Sequence[Line], name: str) -> tuple[Vector, Vector]:
    """Return accuracy in % against virtual time, smoothed over five rounds, mean over seeds."""
    # from one second on: before it nobody has trained
    clocks = [line["curve"]["virtual_s"] for line in lines]
    smoothed = [100 * curves.smooth(line["curve"][name], 5) for line in lines]
    return curves.over_time(clocks, smoothed, start=1.0)


def section(name: str, lines: list[Line]) -> str:
    runs = record.by(lines, "name")
    rows = [row(each, own, runs[BASE]) for each, own in runs.items()]
    seeds = ", ".join(map(str, record.seeds(lines)))
    return (
        f"## {name}\n\nSeeds {seeds}; {record.software(lines)}.\n\n{tables.table(HEAD, rows)}\n"
        f"More than 2 points below FedAvg on the last two classes: {losers(runs)}.\n\n"
    )


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    panels = {}
    for name, own in list(groups.items())[:2]:
        runs = record.by(own, "name").items()
        panels[f"{name}: the last two classes"] = {each: curve(of, "slow") for each, of in runs}
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, folder / "curves.png", *labels, xscale="log")
    sections = "".join(section(name, own) for name, own in groups.items())
    return {**lines[0]["case"], "sections": sections}
