"""Herding bounds and excess loss, beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import last
from flwr_hetero_studies.core.record import Line, by, metric
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.cd_grab.fixed import METHODS, OURS, PAPER
from flwr_hetero_studies.papers.cd_grab.orders import D_RR, EXACT, PAIR_BAL
from flwr_hetero_studies.papers.report import coverage

LAST = 5
"""Epochs at the end of a run that are averaged."""
SKETCHED = "CD-GraB, k = 1024"
SHOWN = (PAIR_BAL, EXACT, SKETCHED)
"""Beside random orders, in the table of all experiments."""
TRAINING = ["x D-RR", "test accuracy", "herding bound x D-RR", "order bytes"]
Groups = Mapping[str, list[Line]]
Bounds = Mapping[str, list[float]]
"""By method, seed by seed."""
Least = Mapping[tuple[int, float, int], float]
"""Least value of the objective by examples, l2 and seed."""


def ratio(ours: Mapping[int, float], base: Mapping[int, float]) -> str:
    both = sorted(ours.keys() & base.keys())
    if not both:
        return ""
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"


def summary(groups: Groups, least: Least) -> str:
    rows = []
    loss = excess(groups.get("softmax, 8 nodes", []), least)
    for name, what, wanted in (
        (EXACT, "excess loss at the larger step, exact / D-RR", "at most 0.5"),
        (SKETCHED, "the same, sketches of 1,024", "at most 0.6"),
    ):
        if name in loss:
            rows.append([what, wanted, ratio(loss[name], loss.get(D_RR, {}))])
    if fleets := relative_bounds(groups.get("fleet", []), "fleet", OURS):
        worst = max(fleets, key=lambda name: over_alone(fleets[name]))
        what = "never worse than ID-GraB(PairBal): worst ratio of bounds"
        rows.append([what, "at most 1", f"{over_alone(fleets[worst]):.2f} ({worst})"])
    return tables.table(["what", "wanted", "measured"], rows)


def relative_bounds(lines: list[Line], key: str, final: str) -> dict[str, Bounds]:
    """Return bounds as multiples of random orders', by a key's value, method and seed."""
    found: dict[str, Bounds] = {}
    for value, own in by(lines, key).items():
        bound = {(x["case"]["method"], x["seed"]): x["metrics"]["bound"] for x in own}
        both = sorted(s for method, s in bound if method == final and (D_RR, s) in bound)
        methods = [m for m in by(own, "method") if all((m, s) in bound for s in both)]
        if both:
            found[value] = {m: [bound[m, s] / bound[D_RR, s] for s in both] for m in methods}
    return found


def sketch(lines: list[Line]) -> str:
    names, rows = [name.removeprefix("CD-GraB, ") for name in METHODS[1:]], []
    dims = {line["case"]["model"]: line["metrics"]["dim"] for line in lines}
    for model, found in relative_bounds(lines, "model", EXACT).items():
        bounds, alone = [found[name] for name in METHODS[1:]], found[PAIR_BAL]
        worth = [
            name
            for name, own in zip(names, bounds, strict=True)
            if "k = " in name and all(a < b for a, b in zip(own, alone, strict=True))
        ]
        cells = [spread(own, ".2g") for own in bounds]
        rows.append([model, f"{dims[model]:,}", len(alone), *cells, [*worth, "none"][0]])
    head = [name.replace("exact", "whole gradients") for name in names]
    return tables.table(["model", "d", "seeds", *head, "smallest worth its bytes"], rows)


def over_alone(found: Bounds) -> float:
    return float(np.mean(found[OURS]) / np.mean(found[PAIR_BAL]))


def fleet(lines: list[Line]) -> str:
    names = (PAIR_BAL, PAPER, OURS)
    rows = [
        [name, *(spread(found[m], ".2g") for m in names)]
        for name, found in relative_bounds(lines, "fleet", OURS).items()
    ]
    return tables.table(["case", *names], rows)


def excess(lines: Sequence[Line], least: Least) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        case, seed = line["case"], line["seed"]
        key = (case["num_examples"], case["l2"], seed)
        if case["model"] != "softmax" or key in least:
            above = last(line, "loss", LAST) - (least[key] if case["model"] == "softmax" else 0.0)
            found.setdefault(case["name"], {})[seed] = above
    return found


def training(lines: list[Line], least: Least, path: Path) -> dict[str, str]:
    text, panels, short = "", {}, []
    for name, runs in by(lines, "experiment").items():
        case, methods, rows = runs[0]["case"], by(runs, "name"), []
        units = case["num_examples"] // case["nodes"] // case["batch_size"]
        text += (
            f"### {name}\n\nd = {runs[0]['metrics']['dim']:,}, {case['num_examples']} examples, "
            f"{units} units of {case['batch_size']} per node, step {case['lr']}, l2 {case['l2']}, "
            f"{case['epochs']} epochs.\n\n"
        )
        found = excess(runs, least)
        bounds = {
            n: {x["seed"]: x["metrics"]["herding"] for x in own} for n, own in methods.items()
        }
        beside = {method: ratio(loss, found.get(D_RR, {})) for method, loss in found.items()}
        herd = {method: ratio(bound, bounds.get(D_RR, {})) for method, bound in bounds.items()}
        for method, loss in found.items():
            own = methods[method]
            right = f"{100 * np.mean([last(line, 'accuracy', LAST) for line in own]):.1f} %"
            share = sum(metric(own, "order_bytes")) / sum(metric(own, "model_bytes"))
            cells = [spread(list(loss.values())), beside[method], right, herd[method]]
            rows.append([method, len(loss), *cells, f"{100 * share:.2g} %" if share else "0"])
        shown = (f"{beside[m]} ({herd[m]})" if m in found else "" for m in SHOWN)
        short.append([name, spread(list(found.get(D_RR, {}).values())), *shown])
        what = "excess of the objective" if case["model"] == "softmax" else "training loss"
        text += tables.table(["order", "seeds", what, *TRAINING], rows) + "\n"
        losses = {n: [line["curve"]["loss"] for line in own] for n, own in methods.items()}
        panels[name] = {n: (range(len(x[0])), np.mean(x, axis=0)) for n, x in losses.items()}
    plots.draw(panels, path, "epoch", "objective", size=(4.0, 2.6), yscale="log")
    return {"training": tables.table(["experiment", D_RR, *SHOWN], short), "orders": text}


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = by(lines, "experiment")
    known = [(line, line["case"]) for line in groups.get("optimum", [])]
    least = {(c["num_examples"], c["l2"], x["seed"]): x["metrics"]["value"] for x, c in known}
    parts: dict[str, Any] = {"versions": record.software(lines, "flwr", "torch", "numpy")}
    parts["summary"] = summary(groups, least)
    parts["fleet_seeds"] = len(record.seeds(groups.get("fleet", [])))
    parts |= {f.__name__: f(groups[f.__name__]) for f in (sketch, fleet) if f.__name__ in groups}
    if own := [line for line in lines if "herding" in line["metrics"]]:
        parts |= training(own, least, folder / "training.png")
    return parts | coverage("cd-grab")
