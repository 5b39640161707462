"""Accuracy on all classes and on the slow nodes' own, at the end and against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.objectives.cases import SETTINGS

BASE = "FedAvg"
LAST = 10
"""Rounds at the end of a run of which the mean counts."""
MARGIN = 0.02
"""Accuracy on the slow nodes' classes that may be lost before a cell is bold."""
HEAD = ["setting", "all classes", "device-seconds", "virtual s"]


def ends(lines: Sequence[Line], name: str) -> list[float]:
    return [100 * curves.last(line, name, LAST) for line in lines]


def row(name: str, lines: Sequence[Line]) -> list[str]:
    every = tables.extent(ends(lines, "accuracy"), "{:.1f}")
    costs = [f"{mean(x['curve'][key][-1] for x in lines):.0f}" for key in ("device_s", "virtual_s")]
    return [name, every, *costs]


def gap(points: Sequence[float]) -> str:
    """Write the points above FedAvg, in bold if too many are lost, and nothing for FedAvg."""
    if not any(points):
        return ""
    text = tables.extent(points, "{:+.1f}")
    return f"**{text}**" if mean(points) < -100 * MARGIN else text


def gaps(lines: Sequence[Line], base: Sequence[Line]) -> list[float]:
    """Return the points above FedAvg on the slow nodes' classes, seed by seed."""
    pairs = record.pairs(lines, base)
    return [ends([own], "slow")[0] - ends([its], "slow")[0] for own, its in pairs]


def curve(lines: Sequence[Line], name: str) -> tuple[Vector, Vector]:
    """Return accuracy in %, smoothed over five rounds, against virtual time: means over seeds."""
    # In the first second no node has trained.
    clocks = [line["curve"]["virtual_s"] for line in lines]
    smoothed = [100 * curves.smooth(line["curve"][name], 5) for line in lines]
    return curves.over_time(clocks, smoothed, start=1.0)


def section(name: str, lines: list[Line]) -> str:
    rows = [row(*group) for group in record.by(lines, "name").items()]
    count = len(record.seeds(lines))
    return f"## {name}\n\n{count} seeds.\n\n{tables.table(HEAD, rows)}\n"


def summary(groups: Mapping[str, list[Line]]) -> str:
    """Tabulate the settings, with the experiments side by side."""
    experiments = [record.by(lines, "name") for lines in groups.values()]
    rows = []
    for setting in experiments[0]:
        cells = [cell(runs.get(setting, []), runs[BASE]) for runs in experiments]
        rows.append([setting, *cells])
    return tables.table(["setting", *groups], rows)


def cell(lines: Sequence[Line], base: Sequence[Line]) -> str:
    """Write the mean accuracies on all classes and on the last two, and the gap to FedAvg."""
    if not lines:
        return ""
    text = " / ".join(f"{mean(ends(lines, name)):.1f}" for name in ("accuracy", "slow"))
    points = gap(gaps(lines, base))
    return f"{text}, {points}" if points else text


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    panels = {}
    for name, found in list(groups.items())[:2]:
        runs = record.by(found, "name").items()
        drawn = {setting: curve(lines, "slow") for setting, lines in runs}
        panels[f"{name}: the last two classes"] = drawn
    labels = ("virtual time in seconds", "test accuracy in %")
    plots.draw(panels, folder / "curves.png", *labels, xscale="log")
    sections = "".join(section(name, found) for name, found in groups.items())
    return {
        **{name: lines[0]["case"][name] for name in SETTINGS},
        "seeds": len(record.seeds(lines)),
        "summary": summary(groups),
        "sections": sections,
        "software": record.software(lines),
    }
