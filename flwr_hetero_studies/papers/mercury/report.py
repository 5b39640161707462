"""Gains over uniform sampling, cell by cell, and what Mercury costs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.mercury.cases import DEFAULT, UNIFORM
from flwr_hetero_studies.papers.report import coverage

SMOOTHING = 9
"""Points of a curve that are averaged before a target counts as reached."""
DROPS = (0.005, 0.01, 0.02, 0.04)
"""Targets: uniform sampling's own end accuracy in the same seed, less this; the first counts."""
SLOWER = 0.97
"""The default is to keep at least this part of uniform sampling's speed in every cell."""
PAPER = {"wifi-10": "3.74x", "wifi-50": "3.64x", "wifi-100": "3.62x", "wifi-200": "3.48x",
         10.0: "2.75x", 1.0: "2.5x", 0.5: "2.41x"}  # fmt: skip
"""By link Figure 16b, by alpha Figure 18: CIFAR-10, ResNet-18, Adam."""
PAPER_RIVALS = {"adacomm": "1.21x to 1.88x", "bacc": "2.4x to 3.7x"}
"""Section 6.2."""
SHOWN = (UNIFORM, DEFAULT, "free", "bacc, paper", "adacomm")
CELL = ("data", "rows", "model", "batch-size", "learning-rate", "experiment")
METHOD = ["rounds to target", "seconds to target", "gain at target", "gain over four targets",
          "end accuracy"]  # fmt: skip
DEFAULT_HEAD = ["task, model, learning rate", "Mbit/s", "data", "nodes", "uniform: rounds",
                "end accuracy", f"default: {METHOD[0]}", *METHOD[1:], "not slower",
                "paper"]  # fmt: skip
RIVALS_HEAD = ["method", *METHOD, "scoring hidden", "paper"]
RIVALS_SHOWN = ["method", METHOD[3], METHOD[4]]
Methods = Mapping[str, list[Line]]
"""The runs of a cell."""


def end_accuracy(line: Line) -> float:
    return curves.last(line, "accuracy", SMOOTHING)


def smooth(line: Line) -> curves.Vector:
    return curves.smooth(line["curve"]["accuracy"], SMOOTHING, centred=True)


def time_to(line: Line, target: float, clock: str, never: float = np.nan) -> float:
    return curves.time_to(line["curve"][clock], smooth(line), target, never=never)


def gain(line: Line, base: Line, drop: float) -> float:
    """Return uniform's seconds over this run's; a target never reached counts as at the end."""
    target = end_accuracy(base) - drop
    seconds = time_to(line, target, "virtual_s", line["curve"]["virtual_s"][-1])
    return time_to(base, target, "virtual_s") / seconds if seconds else float("nan")


def pooled_gain(line: Line, base: Line) -> float:
    return float(np.exp(np.mean([np.log(gain(line, base, drop)) for drop in DROPS])))


def pooled_gains(methods: Methods, name: str) -> list[float]:
    return [pooled_gain(*pair) for pair in record.pairs(methods[name], methods[UNIFORM])]


def cells_of(lines: Sequence[Line]) -> list[Methods]:
    """Group runs by cell and method; IID before ever more unequal data."""

    def place(group: list[Line]) -> tuple[Any, ...]:
        case = group[0]["case"]
        task, alpha = (case["data"], case["model"]), case.get("alpha", float("inf"))
        return (*task, case["nodes"], int(case["fleet"][5:]), -alpha)

    groups = record.by(sorted(lines, key=lambda line: line["seed"]), *CELL).values()
    methods = [record.by(group, "name") for group in sorted(groups, key=place)]
    return [each for each in methods if UNIFORM in each]


def columns(methods: Methods, name: str) -> list[str]:
    """Return steps and seconds to the first target, the gains, and the accuracy at the end."""
    both = record.pairs(methods[name], methods[UNIFORM])
    targets = [(line, end_accuracy(base) - DROPS[0]) for line, base in both]
    return [
        spread([time_to(*each, "round") for each in targets]),
        spread([time_to(*each, "virtual_s") for each in targets]),
        spread([gain(*pair, DROPS[0]) for pair in both]),
        spread(pooled_gains(methods, name)),
        f"{spread([100 * end_accuracy(line) for line, _ in both], '.2f')} %",
    ]


def default(cells: list[Methods]) -> dict[str, Any]:
    rows, every, links = [], [], defaultdict[Any, dict[int, str]](dict)
    for methods in cells:
        gains, case = pooled_gains(methods, DEFAULT), methods[DEFAULT][0]["case"]
        base, alpha = columns(methods, UNIFORM), case.get("alpha")
        every += [value for value in gains if np.isfinite(value)]
        task = f"{case['data']}, {case['model']}, {case['learning-rate']:g}"
        split = "IID" if alpha is None else f"Dirichlet {alpha:g}"
        cell = [task, case["fleet"][5:], split, case["nodes"], base[0], base[-1]]
        links[case["data"], case["nodes"], split][int(case["fleet"][5:])] = spread(gains)
        verdict = "yes" if np.mean(gains) >= SLOWER else "**no**"
        rows.append([*cell, *columns(methods, DEFAULT), verdict, PAPER[alpha or case["fleet"]]])
    figures = {"mean_gain": mean(every), "least_gain": min(every), "most_gain": max(every)}
    figures |= {"gain_deviation": pstdev(every), "num_pairs": len(every), "num_cells": len(rows)}
    figures["kept"] = sum(row[-2] == "yes" for row in rows)
    speeds = sorted({speed for own in links.values() for speed in own})
    short = [[*key, *(own.get(speed, "") for speed in speeds)] for key, own in links.items()]
    head = ["task", "nodes", "data", *(f"{speed} Mbit/s" for speed in speeds)]
    every_column = tables.table(DEFAULT_HEAD, rows)
    return figures | {"default": tables.table(head, short), "default_in_full": every_column}


def rivals(cells: list[Methods]) -> dict[str, Any]:
    text, full, parts = "", "", {}
    for methods in (methods for methods in cells if len(methods) >= 4):
        rows = []
        for name, runs in methods.items():
            hidden = [s for r in runs for s in r["curve"].get("hidden-share", []) if s is not None]
            share = f"{100 * mean(hidden):.0f} %" if hidden else ""
            rows.append([name, *columns(methods, name), share, PAPER_RIVALS.get(name, "")])
        case = methods[UNIFORM][0]["case"]
        title = f"All methods: {case['data']}, {case['experiment']}"
        text += f"## {title}\n\n{tables.only(RIVALS_SHOWN, RIVALS_HEAD, rows)}\n"
        full += f"{title}\n\n{tables.table(RIVALS_HEAD, rows)}\n"
        gains = {name: f"{mean(pooled_gains(methods, name)):.2f}x" for name in methods}
        parts = {"gain": defaultdict(lambda: "not run", gains)}
    known = [f"{mean(pooled_gains(methods, DEFAULT)):.2f}x" for methods in cells]
    if not parts:
        return {}
    return parts | {"rivals": text, "rivals_in_full": full, "low": min(known), "high": max(known)}


def draw_cells(cells: list[Methods], path: Path) -> None:
    data = cells[-1][UNIFORM][0]["case"]["data"]
    panels = defaultdict[str, dict[str, Any]](dict)
    for methods in cells:
        case = methods[UNIFORM][0]["case"]
        for name in (each for each in SHOWN if case["data"] == data and each in methods):
            clock = np.mean([line["curve"]["virtual_s"] for line in methods[name]], axis=0)
            accuracy = 100 * np.mean([smooth(line) for line in methods[name]], axis=0)
            panels[case["experiment"]][name] = (clock, accuracy)
    labels = ("virtual time, s", "test accuracy in %")
    plots.draw(panels, path, *labels, columns=4, size=(3.4, 2.5), ylim=(60, None))


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if cells := [methods for methods in cells_of(lines) if DEFAULT in methods]:
        seeds = record.seeds(lines)
        draw_cells(cells, folder / "curves.png")
        parts |= {"runs": len(lines), "case": lines[0]["case"], "first_seed": seeds[0]}
        parts |= {"last_seed": seeds[-1], **default(cells), **rivals(cells)}
        parts["versions"] = record.software(lines, "flwr", "torch", "numpy")
    return parts | coverage("mercury")
