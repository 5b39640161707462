"""Herding bounds and excess loss, beside the paper's."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import last
from flwr_hetero_studies.core.record import Line, by, metric
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.cd_grab.fixed import OURS
from flwr_hetero_studies.papers.cd_grab.orders import CD_GRAB, D_RR, EXACT, PAIR_BAL
from flwr_hetero_studies.papers.cd_grab.vectors import FLEETS, PUBLISHED, beside

LAST = 5
"""Epochs at the end of a run that are averaged."""
TRAINING = ["x D-RR", "test accuracy", "herding bound x D-RR", "order bytes"]
Groups = Mapping[str, list[Line]]
Least = Mapping[tuple[int, float, int], float]
"""Least value of the objective by examples, l2 and seed."""


def ratio(ours: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Divide the means over the seeds that both have."""
    both = sorted(ours.keys() & base.keys())
    if not both:
        return ""
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"


def summary(groups: Groups, least: Least) -> str:
    """Tabulate what was wanted and what is measured."""
    rows = []
    if million := record.of(groups.get("fig10", []), method=CD_GRAB):
        ours = settled(million)
        found = f"{min(ours):.2f} to {max(ours):.2f}, {len(ours)} numbers of nodes"
        rows.append(["Fig. 10: the bound does not grow with the number of nodes", "2.3 to 2.6",
                     found])  # fmt: skip
    loss = excess(groups.get("softmax, 8 nodes", []), least)
    for name, what, wanted in (
        (EXACT, "excess loss at the larger step, exact / D-RR", "at most 0.5"),
        ("CD-GraB, k = 1024", "the same, sketches of 1,024", "at most 0.6"),
    ):
        if name in loss:
            rows.append([what, wanted, ratio(loss[name], loss.get(D_RR, {}))])
    if fleets := fleet_ratios(groups.get("fleet", [])):
        worst = max(fleets, key=lambda name: fleets[name])
        what = "never worse than ID-GraB(PairBal): worst ratio of bounds"
        rows.append([what, "at most 1", f"{fleets[worst]:.2f} ({worst})"])
    return tables.table(["what", "wanted", "measured"], rows)


# --- fixed vectors --------------------------------------------------------------------------


def settled(lines: Iterable[Line]) -> list[float]:
    """Return each run's herding bound, mean of the last 3 rounds."""
    return [last(line, "bounds", 3) for line in lines]


def fig10(lines: list[Line]) -> str:
    """Tabulate the paper's Fig. 10, with its numbers."""
    rows = []
    for nodes, own in sorted(by(lines, "nodes").items()):
        runs = by(own, "method")
        papers = [beside(PUBLISHED[method][FLEETS.index(nodes)]) for method in PUBLISHED]
        ours = [
            f"{spread(settled(runs[method]))} {paper}"
            for method, paper in zip(PUBLISHED, papers, strict=True)
        ]
        rows.append([nodes, *map(str.strip, ours)])
    return tables.table(["nodes", *PUBLISHED], rows)


def relative_bounds(lines: list[Line], final: str) -> dict[str, list[float]]:
    """Return each method's bounds as multiples of random orders', seed by seed."""
    found = {(line["case"]["method"], line["seed"]): line["metrics"]["bound"] for line in lines}
    both = sorted(s for method, s in found if method == final and (D_RR, s) in found)
    methods = [m for m in by(lines, "method") if all((m, s) in found for s in both)]
    return {m: [found[m, s] / found[D_RR, s] for s in both] for m in methods} if both else {}


def sketch(lines: list[Line]) -> str:
    """Say which sketch is worth its bytes."""
    rows, names = [], [name for name in by(lines, "method") if name != D_RR]
    for model, runs in by(lines, "model").items():
        found = relative_bounds(runs, names[-1])
        if PAIR_BAL not in found:
            continue
        alone = found[PAIR_BAL]
        worth = [
            name.removeprefix("CD-GraB, ")
            for name in names
            if "k = " in name and all(a < b for a, b in zip(found[name], alone, strict=True))
        ]
        cells = [spread(found[name], ".2g") for name in names]
        dim = f"{runs[0]['metrics']['dim']:,}"
        rows.append([model, dim, len(alone), *cells, worth[0] if worth else "none"])
    head = [name.removeprefix("CD-GraB, ").replace("exact", "whole gradients") for name in names]
    return tables.table(["model", "d", "seeds", *head, "smallest worth its bytes"], rows)


def fleet(lines: list[Line]) -> str:
    """Tabulate bounds in fleets that are not the paper's."""
    rows, names = [], [name for name in by(lines, "method") if name != D_RR]
    for name, runs in by(lines, "fleet").items():
        if found := relative_bounds(runs, names[-1]):
            cells = [spread(found[m], ".2g") if m in found else "" for m in names]
            own = np.mean(found[names[-1]]) / np.mean(found.get(PAIR_BAL, [np.nan]))
            rows.append([name, len(found[names[-1]]), *cells, f"{own:.2f}"])
    return tables.table(["case", "seeds", *names, "ours / ID-GraB(PairBal)"], rows)


def fleet_ratios(lines: list[Line]) -> dict[str, float]:
    """Divide the bounds of ours by ID-GraB(PairBal)'s, by case, over the seeds that are there."""
    result = {}
    for name, runs in by(lines, "fleet").items():
        methods = by(runs, "method")
        if both := record.pairs(methods.get(OURS, []), methods.get(PAIR_BAL, [])):
            ours, alone = (sum(metric(each, "bound")) for each in zip(*both, strict=True))
            result[name] = ours / alone
    return result


def traffic() -> str:
    """Compute the bytes of orders as shares of the models'."""
    rows, steps, sizes = [], {"1 step": 1, "64 steps": 64, "512 steps": 512}, (256, 1024)
    for dim in (7_850, 61_706, 238_510, 1_000_000, 11_700_000):
        shares = [min(k, dim) * 2 * n / 2 / (8 * dim) for n in steps.values() for k in sizes]
        rows.append([f"{dim:,}", *(f"{100 * share:.2g} %" for share in shares)])
    head = [f"{n}{' a round' * (k == 256)}, k = {k}" for n in steps for k in sizes]
    return tables.table(["d", *head], rows)


# --- training -------------------------------------------------------------------------------


def excess(lines: Sequence[Line], least: Least) -> dict[str, dict[int, float]]:
    """Return the final objective above its least value, by method and seed; else the loss."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        case, seed = line["case"], line["seed"]
        key = (case["num_examples"], case["l2"], seed)
        if case["model"] != "softmax" or key in least:
            above = last(line, "loss", LAST) - (least[key] if case["model"] == "softmax" else 0.0)
            found.setdefault(case["name"], {})[seed] = above
    return found


def training(lines: list[Line], least: Least, path: Path) -> str:
    """Tabulate and draw training with the paper's synchronous steps."""
    text, panels = "", {}
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
        for method, loss in found.items():
            own, beside = methods[method], ratio(loss, found.get(D_RR, {}))
            right = f"{100 * np.mean([last(line, 'accuracy', LAST) for line in own]):.1f} %"
            share = sum(metric(own, "order_bytes")) / sum(metric(own, "model_bytes"))
            cells = [spread(list(loss.values())), beside, right]
            cells += [ratio(bounds[method], bounds.get(D_RR, {}))]
            rows.append([method, len(loss), *cells, f"{100 * share:.2g} %" if share else "0"])
        what = "excess of the objective" if case["model"] == "softmax" else "training loss"
        text += tables.table(["order", "seeds", what, *TRAINING], rows) + "\n"
        losses = {n: [line["curve"]["loss"] for line in own] for n, own in methods.items()}
        panels[name] = {n: (range(len(x[0])), np.mean(x, axis=0)) for n, x in losses.items()}
    plots.draw(panels, path, "epoch", "objective", size=(4.0, 2.6), yscale="log")
    return text


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw the figure."""
    groups = by(lines, "experiment")
    known = [(line, line["case"]) for line in groups.get("optimum", [])]
    least = {(c["num_examples"], c["l2"], x["seed"]): x["metrics"]["value"] for x, c in known}
    parts: dict[str, Any] = {"versions": record.software(lines, "flwr", "torch", "numpy")}
    parts |= {"summary": summary(groups, least), "traffic": traffic()}
    sections = {"fig10": fig10, "sketch": sketch, "fleet": fleet}
    for name, section in sections.items():
        if name in groups:
            parts[section.__name__] = section(groups[name])
    if own := [line for line in lines if "herding" in line["metrics"]]:
        parts["training"] = training(own, least, folder / "training.png")
    return parts
