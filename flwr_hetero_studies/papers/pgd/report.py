"""Steps and time to SGD's losses, and what priorities cost, beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line, by, seeds
from flwr_hetero_studies.papers.pgd.cases import RACES
from flwr_hetero_studies.papers.pgd.gains import (
    PARTS,
    RaceGain,
    chosen,
    end_of,
    gain,
    goals,
    mean_curve,
)
from flwr_hetero_studies.papers.pgd.workers import DRAWN, PGD_A, SGD, SPREAD
from flwr_hetero_studies.papers.report import coverage

SAME = 0.02
"""Gains that differ from 1 by less are no difference."""
PAPER = {"fig10": "PGD-A 2 to 5 times faster at first, up to 1.6 times in all",
         "late": "not in the paper"}  # fmt: skip
SHORT = {PGD_A: "PGD-A as published", SPREAD: "PGD-A, first epoch in turn",
         DRAWN: "stochastic (default)"}  # fmt: skip
Races = Mapping[tuple[str, str], Mapping[str, list[Line]]]
"""Runs by experiment and task, and by method."""
Prices = Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]]
"""What a step and a start cost by experiment and task, and by method."""
FREE = {"price": 1.0, "start": 0.0}
"""Of SGD, and where it was not measured."""


def gains_of(runs: Mapping[str, list[Line]], own: str, costs: Mapping[str, Any]) -> list[RaceGain]:
    """Return a method's gains over SGD, one for each part of SGD's run."""
    cost = costs.get(own, FREE)
    return [gain(runs[own], runs[SGD], part, cost) for part in range(len(PARTS))]


def count(lines: Sequence[Line]) -> str:
    number = len(seeds(lines))
    return f"{number} seed{'s' * (number != 1)}"


def in_short(races: Races, prices: Prices) -> str:
    """Give gains in time over SGD, all tasks in one table, and count where the default loses."""
    rows, medians = [], {"in_steps": list[float](), "in_time": list[float]()}
    for key, runs in races.items():
        found = {name: gains_of(runs, name, prices.get(key, {})) for name in SHORT if name in runs}
        cells = (" / ".join(each.brief() for each in found.get(name, ())) for name in SHORT)
        rows.append([f"{key[0]}, {key[1]}", *cells])
        for field, own in medians.items():
            own += [float(np.median(getattr(each, field))) for each in found.get(DRAWN, ())]
    text = tables.table(["race", *SHORT.values()], rows) + "\n"
    for words, own in zip(("In steps", "In time"), medians.values(), strict=True):
        slower, faster = (sum(s * (v - 1) > SAME for v in own) for s in (-1, 1))
        text += (
            f"{words} the default is more than {SAME:.0%} faster than SGD in {faster} of "
            f"{len(own)} cells and slower in {slower}.\n"
        )
    return text


def race(experiment: str, races: Races, prices: Prices) -> str:
    text = f"## {experiment}: convergence at equal work\n\nPaper: {PAPER[experiment]}.\n"
    for key, runs in races.items():
        if key[0] != experiment:
            continue
        rows, case, costs = [], runs[SGD][0]["case"], prices.get(key, {})
        for method, own in runs.items():
            price = costs.get(method, FREE)["price"]
            cells = [method, f"{own[0]['case']['lr']:g}", len(own), f"{price:.2f}x"]
            for each in gains_of(runs, method, costs):
                cells += each.cells()
            rows.append([*cells, final_loss(own)])
        head = ["method", "lr", "seeds", "a step"]
        for goal in goals(runs[SGD]):
            head += [f"steps to {goal:.3g}", "gain in time"]
        size = f"N = {case['samples']}, k = {case['top']:.1%}, r = {case['renewal']:.1%}"
        text += f"\n### {key[1]}, {size}, {count(runs[SGD])}\n\n"
        text += tables.table([*head, "final loss"], rows)
    return text + "\n"


def draw_races(races: Races, prices: Prices, path: Path) -> None:
    panels: dict[str, dict[str, tuple[Vector, Vector]]] = {}
    for key, runs in races.items():
        for clock in ("steps", "time"):
            drawn = panels.setdefault(f"{key[0]}, {key[1]}, by {clock}", {})
            for method in (SGD, SPREAD, DRAWN):
                own, cost = runs[method], prices.get(key, {}).get(method, FREE)
                x = mean_curve(own, "iteration")
                x = cost["start"] + cost["price"] * x if clock == "time" else x
                drawn[method] = (x, mean_curve(own, "loss"))
    labels = (("steps", "time, in steps of SGD"), "training loss")
    plots.draw(panels, path, *labels, columns=2, size=(4.5, 2.4), yscale="log")


def final_loss(runs: Sequence[Line]) -> str:
    """Write the loss at the end, or how many runs have diverged."""
    ends = [end_of(line) for line in runs]
    broken = int(np.isinf(ends).sum())
    return f"diverged in {broken} of {len(ends)}" if broken else tables.spread(ends, ".4f", ".4f")


def cost(lines: list[Line]) -> str:
    """Give ways by models: CPU time in milliseconds, and in those of forward and backward."""
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        for way in line["metrics"]["ways"]:
            own = cells.setdefault(way["way"], {})
            own[line["case"]["name"]] = "{ms:.1f} ({ratio:.2f}x)".format(**way)
    models = [line["case"]["name"] for line in lines]
    rows = [[way, *(own.get(model, "") for model in models)] for way, own in cells.items()]
    return tables.table(["way", *models], rows)


def repeats(lines: list[Line]) -> str:
    form = "{ms_least:.1f} to {ms_most:.1f}"
    rows = [
        [line["case"]["name"], way["way"], form.format(**way)]
        for line in lines for way in line["metrics"]["ways"]
    ]  # fmt: skip
    return tables.table(["model", "way", "CPU ms of the repeats"], rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = by(lines, "experiment")
    priced = groups.get("price", [])
    prices = {(x["case"]["race"], x["case"]["task"]): x["metrics"]["methods"] for x in priced}
    races = {
        (experiment, task): chosen(own)
        for experiment in RACES
        for task, own in by(groups.get(experiment, []), "task").items()
        if record.of(own, method=SGD)
    }
    parts: dict[str, Any] = {"versions": record.software(lines, "torch")} | coverage("pgd")
    if races:
        draw_races(races, prices, folder / "races.png")
        parts["short"] = in_short(races, prices)
        parts["seeds"] = count([line for runs in races.values() for line in runs[SGD]])
        parts["races"] = "".join(race(name, races, prices) for name in RACES if name in groups)
    if own := groups.get("cost"):
        parts |= {"cost": cost(own), "repeats": repeats(own)}
    return parts
