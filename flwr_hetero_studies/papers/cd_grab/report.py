"""Herding bounds with every sketch and on every fleet, as multiples of random orders'."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line, by
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.cases import HERE
from flwr_hetero_studies.papers.cd_grab.cases import METHODS, OURS, PAPER
from flwr_hetero_studies.papers.cd_grab.orders import D_RR, EXACT, PAIR_BAL
from flwr_hetero_studies.papers.report import best, parts_of

Bounds = Mapping[str, list[float]]
"""By method, seed by seed."""


def relative_bounds(lines: list[Line], key: str, last_method: str) -> dict[str, Bounds]:
    """Return bounds as multiples of random orders', by the values of a key.

    Only seeds count that have random orders and the method that is run last.
    """
    groups: dict[str, Bounds] = {}
    for value, group in by(lines, key).items():
        bound = {(x["case"]["method"], x["seed"]): x["metrics"]["bound"] for x in group}
        seeds = sorted(s for method, s in bound if method == last_method and (D_RR, s) in bound)
        methods = [m for m in by(group, "method") if all((m, s) in bound for s in seeds)]
        if seeds:
            groups[value] = {m: [bound[m, s] / bound[D_RR, s] for s in seeds] for m in methods}
    return groups


def sketch(lines: list[Line]) -> dict[str, str]:
    """Return the table of sketches, and the smallest sketch that helps with each model."""
    names = [name.removeprefix("CD-GraB, ") for name in METHODS[1:]]
    dims = {line["case"]["model"]: line["metrics"]["dim"] for line in lines}
    rows = []
    for model, by_method in relative_bounds(lines, "model", EXACT).items():
        bounds = [by_method[name] for name in METHODS[1:]]
        alone = by_method[PAIR_BAL]
        worth = [
            name
            for name, values in zip(names, bounds, strict=True)
            if "k = " in name and all(a < b for a, b in zip(values, alone, strict=True))
        ]
        cells = [spread(values, ".2g") for values in bounds]
        rows.append([model, f"{dims[model]:,}", len(alone), *cells, [*worth, "none"][0]])
    head = [name.replace("exact", "whole gradients") for name in names]
    table = tables.table(["model", "d", "seeds", *head, "smallest worth its bytes"], rows)
    return {"sketch": table, "smallest": ", ".join(f"{row[-1]} ({row[0]})" for row in rows)}


def fleet(lines: list[Line]) -> dict[str, str]:
    """Return the table of fleets, and where ours is worst beside orders that nodes find alone."""
    methods = (PAIR_BAL, PAPER, OURS)
    rows = []
    ratios = {}
    for name, bounds in relative_bounds(lines, "fleet", OURS).items():
        rows.append([name, *(spread(bounds[method], ".2g") for method in methods)])
        ratios[name] = float(np.mean(bounds[OURS]) / np.mean(bounds[PAIR_BAL]))
    if not ratios:
        return {}
    worst = max(ratios, key=ratios.__getitem__)
    text = f"{ratios[worst]:.2f} ({worst})"
    return {"fleet": tables.table(["case", *methods], rows), "worst": text}


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = by(lines, "experiment")
    parts: dict[str, Any] = {"versions": record.software(lines, "flwr", "torch", "numpy")}
    if "sketch" in groups:
        parts |= sketch(groups["sketch"])
    if "fleet" in groups:
        parts |= fleet(groups["fleet"])
        parts["fleet_seeds"] = len(record.seeds(groups["fleet"]))
    return parts | parts_of("cd-grab", best(record.read(HERE)))
