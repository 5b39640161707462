"""Herding bounds, excess loss and speed, beside the paper's and an independent implementation's."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import last
from flwr_hetero_studies.core.record import Line, by, metric
from flwr_hetero_studies.core.tables import spread

BASE, ALONE = "D-RR", "ID-GraB(PairBal)"
LAST = 5
"""Epochs at the end of a run that are averaged."""
PAPER = {
    "ID-GraB(Bal)": {5: 4.2, 10: 5.8, 20: 8.5, 50: 12.5, 100: 17.5},
    "ID-GraB(PairBal)": {5: 6.0, 10: 8.5, 20: 12.0, 50: 18.0, 100: 23.5},
    "CD-GraB": {5: 2.6, 10: 2.5, 20: 2.5, 50: 2.3, 100: 2.3},
}
"""Read off the paper's Fig. 10, a million vectors."""
TWIN = {
    1_000_000: {
        "D-RR": {5: 342, 10: 317, 20: 343, 50: 407, 100: 397},
        "ID-GraB(Bal)": {5: 4.26, 10: 5.83, 20: 8.01, 50: 11.9, 100: 16.9},
        "ID-GraB(PairBal)": {5: 6.37, 10: 8.39, 20: 11.5, 50: 17.6, 100: 25.0},
        "CD-GraB": {5: 2.66, 10: 2.48, 20: 2.45, 50: 2.44, 100: 2.21},
    },
    65_536: {
        "D-RR": {4: 92.3, 16: 99.0, 64: 81.0},
        "ID-GraB(Bal)": {4: 3.58, 16: 6.34, 64: 12.7},
        "ID-GraB(PairBal)": {4: 4.94, 16: 9.07, 64: 17.0},
        "CD-GraB": {4: 2.52, 16: 2.24, 64: 2.07},
    },
}
"""An independent implementation that is not part of this package, other seeds."""
TRAINING = ["x D-RR", "test accuracy", "herding bound x D-RR", "order bytes"]
SPEED = {
    "pairs/s, ours": "{ours_pairs_per_s:,}",
    "NumPy loop": "{numpy_pairs_per_s:,}",
    "torch loop": "{torch_pairs_per_s:,}",
    "read GB/s": "{read_gb_per_s}",
    "of reading two gradients": "{of_reading_two_gradients:.2f}",
    "of reading the difference": "{of_reading_the_difference:.2f}",
    "extra memory, vectors": "{extra_vectors}",
}
Groups = Mapping[str, list[Line]]


def ratio(ours: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Divide the means over the seeds that both have."""
    both = sorted(ours.keys() & base.keys())
    if not both:
        return ""
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"


def summary(groups: Groups) -> str:
    """Tabulate what was wanted and what is measured."""
    rows = []
    million = record.of(groups.get("fig10", []), vectors=1_000_000, method="CD-GraB")
    if million:
        ours = [np.mean(settled(own)) for own in by(million, "nodes").values()]
        found = f"{min(ours):.2f} to {max(ours):.2f}, {len(ours)} numbers of nodes"
        rows.append(["Fig. 10: the bound does not grow with the number of nodes", "2.3 to 2.6",
                     found])  # fmt: skip
    loss = excess(groups.get("softmax, 8 nodes", []), least_of(groups))
    for name, what, wanted in (
        ("CD-GraB, exact", "excess loss at the larger step, exact / D-RR", "at most 0.5"),
        ("CD-GraB, k = 1024", "the same, sketches of 1,024", "at most 0.6"),
    ):
        if name in loss:
            rows.append([what, wanted, ratio(loss[name], loss.get(BASE, {}))])
    if balance := groups.get("pair balance"):
        parts = {"two": "{of_reading_two_gradients:.2f}", "one": "{of_reading_the_difference:.2f}"}
        limits = [f"{two} / {one} ({name})" for name, two, one in tables.rows(balance, parts)]
        what = "share of the limit by reading two gradients / the difference"
        rows.append([what, "at least 0.5", ", ".join(limits)])
    if fleets := fleet_ratios(groups.get("fleet", [])):
        worst = max(fleets, key=lambda name: fleets[name])
        what = "never worse than ID-GraB(PairBal): worst ratio of bounds"
        rows.append([what, "at most 1", f"{fleets[worst]:.2f} ({worst})"])
    return tables.table(["what", "wanted", "measured"], rows)


# --- fixed vectors --------------------------------------------------------------------------


def settled(lines: Iterable[Line]) -> list[float]:
    """Return each run's herding bound, mean of the last 3 rounds."""
    return [last(line, "bounds", 3) for line in lines]


def fig10(lines: list[Line], folder: Path) -> str:
    """Tabulate and draw the paper's Fig. 10."""
    text = ""
    for number, own in by(lines, "vectors").items():
        methods, rows, panels = by(own, "method"), [], {}
        for nodes, each in sorted(by(own, "nodes").items()):
            runs = {method: record.of(each, method=method) for method in methods}
            rows.append([nodes, *(cell(runs[m], number, m, nodes) for m in methods)])
            bounds = {
                m: [x["curve"]["bounds"] for x in found] for m, found in runs.items() if found
            }
            panels[f"{nodes} nodes"] = {
                m: (range(1, len(found[0]) + 1), np.mean(found, axis=0))
                for m, found in bounds.items()
            }
        name, labels = f"synthetic_{number}.png", ("round", "herding bound (Eq. 8)")
        plots.draw(panels, folder / name, *labels, columns=5, size=(2.6, 2.9), yscale="log")
        took = sum(metric(methods.get("CD-GraB", []), "took_s"))
        text += (
            f"### {number:,} vectors, {len(record.seeds(own))} seed(s)\n\nAll runs of CD-GraB "
            f"together took {took:.0f} s on a loaded machine.\n\n"
            f"{tables.table(['nodes', *methods], rows)}\n![Herding bound]({name})\n\n"
        )
    return text.rstrip() + "\n"


def cell(runs: list[Line], number: int, method: str, nodes: int) -> str:
    """Give ours, the twin's in brackets, the paper's in braces."""
    twin = TWIN.get(number, {}).get(method, {}).get(nodes)
    paper = PAPER.get(method, {}).get(nodes) if number == 1_000_000 else None
    text = spread(settled(runs)) if runs else "not run"
    return text + (f" [{twin:g}]" if twin else "") + (f" {{{paper:g}}}" if paper else "")


def relative_bounds(lines: list[Line], final: str) -> dict[str, list[float]]:
    """Return each method's bounds as multiples of random orders', seed by seed."""
    found = {(line["case"]["method"], line["seed"]): line["metrics"]["bound"] for line in lines}
    both = sorted(s for method, s in found if method == final and (BASE, s) in found)
    methods = [m for m in by(lines, "method") if all((m, s) in found for s in both)]
    return {m: [found[m, s] / found[BASE, s] for s in both] for m in methods} if both else {}


def sketch(lines: list[Line]) -> str:
    """Say which sketch is worth its bytes."""
    rows, names = [], [name for name in by(lines, "method") if name != BASE]
    for model, runs in by(lines, "model").items():
        found = relative_bounds(runs, names[-1])
        if ALONE not in found:
            continue
        alone = found[ALONE]
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
    rows, names = [], [name for name in by(lines, "method") if name != BASE]
    for name, runs in by(lines, "fleet").items():
        if found := relative_bounds(runs, names[-1]):
            cells = [spread(found[m], ".2g") if m in found else "" for m in names]
            own = np.mean(found[names[-1]]) / np.mean(found.get(ALONE, [np.nan]))
            rows.append([name, len(found[names[-1]]), *cells, f"{own:.2f}"])
    return tables.table(["case", "seeds", *names, "ours / ID-GraB(PairBal)"], rows)


def fleet_ratios(lines: list[Line]) -> dict[str, float]:
    """Divide the bounds of ours by ID-GraB(PairBal)'s, by case, over the seeds that are there."""
    result = {}
    for name, runs in by(lines, "fleet").items():
        methods = by(runs, "method")
        both = record.pairs(methods.get("CD-GraB, ours", []), methods.get(ALONE, []))
        if both:
            ours, alone = (sum(metric(each, "bound")) for each in zip(*both, strict=True))
            result[name] = ours / alone
    return result


def server_rounds(lines: list[Line]) -> str:
    rows = [
        [f"{'whole gradients' if case['dim'] > 1024 else 'sketches'} of {case['dim']:,}",
         case["nodes"], case["pairs"], f"{m['pairs_per_s']:,}", m["extra_vectors"]]
        for case, m in ((line["case"], line["metrics"]) for line in lines)
    ]  # fmt: skip
    head = ["a round of the whole server", "nodes", "pairs each", "pairs/s", "vectors in memory"]
    return tables.table(head, rows)


def traffic() -> str:
    """Compute the bytes of orders as shares of the models'."""
    rows, steps, sizes = [], {"1 step": 1, "64 steps": 64, "512 steps": 512}, (256, 1024)
    for dim in (7_850, 61_706, 238_510, 1_000_000, 11_700_000):
        shares = [min(k, dim) * 2 * n / 2 / (8 * dim) for n in steps.values() for k in sizes]
        rows.append([f"{dim:,}", *(f"{100 * share:.2g} %" for share in shares)])
    head = [f"{n}{' a round' * (k == 256)}, k = {k}" for n in steps for k in sizes]
    return tables.table(["d", *head], rows)


# --- training -------------------------------------------------------------------------------

Least = Mapping[tuple[int, float, int], float]


def least_of(groups: Groups) -> Least:
    """Return the least value of the objective by examples, l2 and seed."""
    lines = [(line, line["case"]) for line in groups.get("optimum", [])]
    return {(c["num_examples"], c["l2"], x["seed"]): x["metrics"]["value"] for x, c in lines}


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


def order_share(lines: Sequence[Line], digits: str) -> str:
    share = sum(metric(lines, "order_bytes")) / sum(metric(lines, "model_bytes"))
    return f"{100 * share:{digits}} %" if share else "0"


def accuracy(lines: Sequence[Line]) -> str:
    return f"{100 * np.mean([last(line, 'accuracy', LAST) for line in lines]):.1f} %"


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
            own, beside = methods[method], ratio(loss, found.get(BASE, {}))
            herding = ratio(bounds[method], bounds.get(BASE, {}))
            cells = [spread(list(loss.values())), beside, accuracy(own), herding]
            rows.append([method, len(loss), *cells, order_share(own, ".2g")])
        what = "excess of the objective" if case["model"] == "softmax" else "training loss"
        text += tables.table(["order", "seeds", what, *TRAINING], rows) + "\n"
        losses = {n: [line["curve"]["loss"] for line in own] for n, own in methods.items()}
        panels[name] = {n: (range(len(x[0])), np.mean(x, axis=0)) for n, x in losses.items()}
    plots.draw(panels, path, "epoch", "objective", size=(4.0, 2.6), yscale="log")
    return text


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw the figures."""
    groups = by(lines, "experiment")
    parts: dict[str, Any] = {"versions": record.software(lines, "flwr", "torch", "numpy")}
    parts |= {"summary": summary(groups), "traffic": traffic()}
    if own := groups.get("fig10"):
        parts["fig10"] = fig10(own, folder)
    if own := groups.get("pair balance"):
        rows = [[name[4:], *cells] for name, *cells in tables.rows(own, SPEED)]
        parts["balance"] = tables.table(["d", *SPEED], rows)
    sections = {"server round": server_rounds, "sketch": sketch, "fleet": fleet}
    for name, section in sections.items():
        if name in groups:
            parts[section.__name__] = section(groups[name])
    if own := [line for line in lines if "herding" in line["metrics"]]:
        parts["training"] = training(own, least_of(groups), folder / "training.png")
    return parts
