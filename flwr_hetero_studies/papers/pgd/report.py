"""Steps and time to SGD's losses, sweeps, and what priorities cost, beside the paper's."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line, by, seeds
from flwr_hetero_studies.papers.pgd.curves import (
    DEFAULT,
    PARTS,
    Gain,
    chosen,
    end_of,
    gain,
    goals,
    mean_curve,
)

SAME = 0.02
"""Gains that differ from 1 by less are no difference."""
PAPER = {
    "fig6": "few renewals: small tops diverge; many: large tops are slower",
    "fig7": "small top: more renewals are stabler and end lower; large top: hardly matters",
    "fig8": "less top and more renewals are better and stabler",
    "fig9": "aggressive 10 to 500 % faster",
    "fig10": "PGD-A 2 to 5 times faster at first, up to 1.6 times in all; PGD-S falls behind SGD",
    "late": "not in the paper",
}
RACES = ("fig10", "late")
SHORT = {
    "PGD-A, full first pass": "PGD-A as published",
    "PGD-A": "PGD-A, first epoch in turn",
    "PGD-S": "PGD-S",
    "normalised": "normalised",
    "stochastic": "stochastic (default)",
    "stochastic, no gate": "stochastic, no gate",
}
DRAWN = ("SGD", "PGD-A", "PGD-S", "normalised", "stochastic", "stochastic, no gate")
"""Methods on the figures of the races."""
FIGURE_1 = {0.005: 0.05, 0.01: 0.08, 0.02: 0.15, 0.05: 0.32}
"""Share of the loss decrease by the top, MLP on MNIST, iteration 50."""
Prices = Mapping[tuple[str, str], Line]


# --- races ----------------------------------------------------------------------------------


def price_of(prices: Prices, race: tuple[str, str], method: str) -> Line:
    """Return what a step of a method costs on a task; one of SGD's if it was not measured."""
    methods = prices[race]["metrics"]["methods"] if race in prices else {}
    known = methods.get(method, {"price": 1.0, "quarters": [1.0] * 4, "start": 0.0})
    return known | {"default": method == DEFAULT}


Races = Mapping[tuple[str, str], Mapping[str, list[Line]]]


def gains_of(races: Races, prices: Prices) -> dict[str, dict[str, list[Gain]]]:
    """Return gains over SGD by race and method, one for each part of SGD's run."""
    return {
        f"{race[0]}, {race[1]} ({count(runs['SGD'])})": {
            method: [
                gain(own, runs["SGD"], part, price_of(prices, race, method))
                for part in range(len(PARTS))
            ]
            for method, own in runs.items()
        }
        for race, runs in races.items()
    }


def count(lines: Sequence[Line]) -> str:
    number = len(seeds(lines))
    return f"{number} seed{'s' * (number != 1)}"


def in_short(found: Mapping[str, Mapping[str, Sequence[Gain]]]) -> str:
    """Give gains in time over SGD, all tasks in one table, and count where the default loses."""
    rows = [
        [race, *(" / ".join(g.brief() for g in methods.get(name, ())) for name in SHORT)]
        for race, methods in found.items()
    ]
    text = tables.table(["race", *SHORT.values()], rows) + "\n"
    for words, field in (("In steps", "in_steps"), ("In time", "in_time")):
        medians = {
            f"{race.split(' (')[0]} at {PARTS[part]:.0%}": float(np.median(getattr(each, field)))
            for race, methods in found.items()
            for part, each in enumerate(methods.get(DEFAULT, ()))
        }
        slower = [f"{cell} ({v:.2f}x)" for cell, v in medians.items() if v < 1 - SAME]
        faster = sum(value > 1 + SAME for value in medians.values())
        text += (
            f"{words} the default is more than {SAME:.0%} faster than SGD in {faster} of "
            f"{len(medians)} cells and more than {SAME:.0%} slower in {len(slower)}"
            f"{': ' + ', '.join(slower) if slower else ''}.\n"
        )
    return text


def race(experiment: str, races: Races, prices: Prices) -> str:
    """Tabulate steps and time to a loss."""
    text = f"## {experiment}: convergence at equal work\n\nPaper: {PAPER[experiment]}.\n"
    for key, runs in races.items():
        if key[0] != experiment:
            continue
        rows, case = [], runs["SGD"][0]["case"]
        for method, own in runs.items():
            price = price_of(prices, key, method)
            cells = [method, f"{own[0]['case']['lr']:g}", len(own), f"{price['price']:.2f}x"]
            for part in range(len(PARTS)):
                cells += gain(own, runs["SGD"], part, price).cells()
            rows.append([*cells, final_loss(own)])
        head = ["method", "lr", "seeds", "a step"]
        for goal in goals(runs["SGD"]):
            head += [f"steps to {goal:.3g}", "gain in time"]
        size = f"N = {case['samples']}, k = {case['top']:.1%}, r = {case['renewal']:.1%}"
        text += f"\n### {key[1]}, {size}, {count(runs['SGD'])}\n\n"
        text += tables.table([*head, "final loss"], rows)
    return text + "\n"


def draw_races(races: Races, prices: Prices, path: Path) -> None:
    """Draw the training loss against steps and against time, a row per race."""
    panels: dict[str, dict[str, tuple[Vector, Vector]]] = {}
    for key, runs in races.items():
        for clock in ("steps", "time"):
            curves = panels.setdefault(f"{key[0]}, {key[1]}, by {clock}", {})
            for method in (method for method in DRAWN if method in runs):
                own, price = runs[method], price_of(prices, key, method)
                x = mean_curve(own, "iteration")
                x = price["start"] + price["price"] * x if clock == "time" else x
                curves[method] = (x, mean_curve(own, "loss"))
    labels = (("steps", "time, in steps of SGD"), "training loss")
    plots.draw(panels, path, *labels, columns=2, size=(4.5, 2.4), yscale="log")


def final_loss(runs: Sequence[Line]) -> str:
    ends = [end_of(line) for line in runs]
    broken = int(np.isinf(ends).sum())
    return f"diverged in {broken} of {len(ends)}" if broken else tables.spread(ends, ".4f", ".4f")


def sweep(experiment: str, lines: list[Line]) -> str:
    """Tabulate final and worst losses over a grid of k and r."""
    text = f"## {experiment}\n\nPaper: {PAPER[experiment]}.\n"
    for task, group in by(lines, "task").items():
        rows = []
        for (method, top, renewal), runs in by(group, "method", "top", "renewal").items():
            losses = mean_curve(runs, "loss")
            rise = max((b - a for a, b in pairwise(losses)), default=0.0)
            rows.append([method, f"{top:.1%}", f"{renewal:.1%}", f"{losses[len(losses) // 2]:.3f}",
                         final_loss(runs), f"{max(rise, 0):.3f}"])  # fmt: skip
        head = ["method", "k", "r", "loss half-way", "final loss", "largest rise"]
        case = group[0]["case"]
        sizes = f"N = {case['samples']}, {case['iterations']} steps, lr {case['lr']:g}"
        text += f"\n### {task}, {sizes}, {count(group)}\n\n{tables.table(head, rows)}"
    return text + "\n"


# --- costs, shares, scaling -----------------------------------------------------------------


def cost(lines: list[Line]) -> str:
    """Tabulate time and memory of the ways to priorities."""
    rows = [
        [f"{line['case']['name']}, batch {line['case']['batch']}", way["way"],
         f"{way['ms']:.1f} ({way['ms_least']:.1f} to {way['ms_most']:.1f})", f"{way['ratio']:.2f}x",
         f"{way['peak_mb']:.0f}",
         "" if way["relative_error"] is None else f"{way['relative_error']:.0e}"]
        for line in lines for way in line["metrics"]["ways"]
    ]  # fmt: skip
    head = ["model", "way", "CPU ms", "of forward + backward", "peak MB", "error"]
    return tables.table(head, rows)


def share(lines: list[Line], path: Path) -> str:
    """Tabulate and draw Figure 1."""
    rows, panels = [], {}
    for line in lines:
        task, left, right = line["case"]["name"], {}, {}
        for look in line["metrics"]["looks"]:
            tops, name = look["tops"], f"iteration {look['iteration']}"
            parts = [(top["of_decrease"], top["of_priorities"]) for top in tops.values()]
            cells = [task, look["iteration"], f"{look['loss']:.3f}", f"{look['negative']:.0%}"]
            rows.append([*cells, *(f"{done:.0%} ({promised:.0%})" for done, promised in parts)])
            left[name] = (look["quantiles"], look["levels"])
            right[name] = ([float(k) for k in tops], [done for done, _ in parts])
        panels[f"{task}: distribution of priorities"] = left
        panels[f"{task}: loss decrease by the top k alone"] = right
    labels = (("priority / mean of |priority|", "k"), ("share of examples", "of that by all"))
    plots.draw(panels, path, *labels, columns=2, size=(4.5, 3))
    rows.append(["paper, MNIST", "50", "", "", *(f"{v:.0%}" for v in FIGURE_1.values())])
    head = ["task", "iteration", "loss", "negative", *(f"top {k:.1%}" for k in FIGURE_1)]
    return tables.table(head, rows)


def scaling(lines: list[Line]) -> str:
    """Tabulate virtual time to one loss over the number of nodes (Figure 11)."""
    rows, counts = [], {row["nodes"]: None for row in lines[0]["metrics"]["rows"]}
    for model, runs in by(lines, "name").items():
        every = [row for run in runs for row in run["metrics"]["rows"]]
        task = f"{model}, {runs[0]['case']['samples']} of {runs[0]['case']['data']}"
        for link in dict.fromkeys(row["link_mbps"] for row in every):
            own = {
                n: [r for r in every if (r["link_mbps"], r["nodes"]) == (link, n)] for n in counts
            }
            cells = [scaling_cell(found, own[1][0]) for found in own.values()]
            losses = joined(own[1], "loss")
            rows.append([task, "topk", f"{link / 1000:g} Gbit/s", *cells, losses])
    head = ["task", "rule", "link", *(f"{n} node{'s' * (n > 1)}" for n in counts), "loss"]
    return tables.table(head, rows)


def joined(rows: Sequence[Line], key: str) -> str:
    """Give the figures of all seeds side by side; one if they are all alike."""
    return ", ".join(dict.fromkeys(f"{row[key]:.3g}" for row in rows))


def scaling_cell(own: Sequence[Line], base: Line) -> str:
    if any(row["speedup"] is None for row in own):
        return "never"
    a_round = base["virtual_s"] / base["rounds"] * own[0]["rounds"] / own[0]["virtual_s"]
    return f"{joined(own, 'speedup')}x ({joined(own, 'rounds')}; {a_round:.2f}x)"


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw the figures."""
    groups = by(lines, "experiment")
    prices = {(x["case"]["race"], x["case"]["task"]): x for x in groups.get("price", [])}
    races = {
        (experiment, task): chosen(own)
        for experiment in RACES
        for task, own in by(groups.get(experiment, []), "task").items()
        if record.of(own, method="SGD")
    }
    parts: dict[str, Any] = {"versions": record.software(lines, "torch")}
    if races:
        draw_races(races, prices, folder / "races.png")
        parts["short"] = in_short(gains_of(races, prices))
    if own := groups.get("cost"):
        doubles = tables.rows(own, {"error_in_double": "{:.0e}"})
        parts |= {"cost": cost(own), "doubles": ", ".join(map(" ".join, doubles))}
    if own := groups.get("share"):
        parts["share"] = share(own, folder / "shares.png")
    texts = [
        race(name, races, prices) if name in RACES else sweep(name, own)
        for name, own in groups.items()
        if name in PAPER
    ]
    parts["experiments"] = "".join(texts)
    if own := groups.get("scaling"):
        parts |= {"scaling": scaling(own), "scaling_seeds": count(own)}
        parts["ms_per_example"] = own[0]["metrics"]["ms_per_example"]
    return parts
