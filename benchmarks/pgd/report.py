"""Turn the json lines of this folder into ``report.md`` and figures; never trains.

Usage: ``python benchmarks/pgd/report.py [--folder FOLDER]``. Files that are missing are left out.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from curves import (
    DEFAULT,
    PARTS,
    Gain,
    Line,
    by,
    chosen,
    final_loss,
    gain,
    goals,
    mean_curve,
    seeds_of,
)
from figures import draw_races, draw_shares
from run import EXPERIMENTS

HERE = Path(__file__).parent
PAPER = {
    "fig6": "few renewals: small tops diverge; many: large tops are slower",
    "fig7": "small top: more renewals are stabler and end lower; large top: hardly matters",
    "fig8": "less top and more renewals are better and stabler",
    "fig9": "aggressive 10 to 500 % faster",
    "fig10": "PGD-A 2 to 5 times faster at first, up to 1.6 times in all; PGD-S falls behind SGD",
    "late": "not in the paper",
}
SWEEPS = ("fig6", "fig7", "fig8", "fig9")
RACES = ("fig10", "late")
SHORT = {
    "PGD-A, full first pass": "PGD-A as published",
    "PGD-A": "PGD-A, first epoch in turn",
    "PGD-S": "PGD-S",
    "normalised": "normalised",
    "stochastic": "stochastic (default)",
    "stochastic, no gate": "stochastic, no gate",
}
SAME = 0.02
"""Gains that differ from 1 by less are no difference."""
DRAWN = ("SGD", "PGD-A", "PGD-S", "normalised", "stochastic", "stochastic, no gate")
"""Methods on the figures of the races."""
FIGURE_1 = {0.005: 0.05, 0.01: 0.08, 0.02: 0.15, 0.05: 0.32}
"""Share of the loss decrease by the top, MLP on MNIST, iteration 50."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def cost(lines: list[Line]) -> str:
    """Time and memory of the ways to priorities."""
    rows = []
    for line in lines:
        error = line["relative_error"]
        rows.append(
            [
                f"{line['model']}, batch {line['batch']}",
                line["way"],
                f"{line['ms']:.1f} ({line['ms_least']:.1f} to {line['ms_most']:.1f})",
                f"{line['ratio']:.2f}x",
                f"{line['peak_mb']:.0f}",
                "" if error is None else f"{error:.0e}",
            ]
        )
    doubles = ", ".join(
        f"{model} {group[0]['error_in_double']:.0e}" for model, group in by(lines, "model").items()
    )
    head = ("model", "way", "CPU ms", "of forward + backward", "peak MB", "error")
    return (
        "## What priorities cost\n\nOne thread, median of the repeats. Peak: growth of the "
        "resident memory in a process of its\nown. Error: largest in single precision, 4 examples, "
        "against per-sample gradients in double precision,\nrelative to the largest priority. "
        f"Forward mode in double precision: {doubles}.\n\n" + table(head, rows)
    )


def shares(lines: list[Line]) -> str:
    """Figure 1."""
    rows = []
    for line in lines:
        cells = [
            f"{top['of_decrease']:.0%} ({top['of_priorities']:.0%})"
            for top in line["tops"].values()
        ]
        negative, loss = f"{line['negative']:.0%}", f"{line['loss']:.3f}"
        rows.append([line["task"], str(line["iteration"]), loss, negative, *cells])
    head = ("task", "iteration", "loss", "negative", *(f"top {k:.1%}" for k in FIGURE_1))
    rows.append(["paper, MNIST", "50", "", "", *(f"{v:.0%}" for v in FIGURE_1.values())])
    return (
        "## Share of the loss decrease by the top (Figure 1)\n\nMeasured by a small step on the "
        "top alone against one on all; in brackets their part of the sum\nof priorities, which "
        "predicts it.\n\n" + table(head, rows) + "\n![Priorities](shares.png)\n"
    )


def race(lines: list[Line], prices: list[Line], experiment: str) -> str:
    """Tabulate steps and time to a loss."""
    text = f"## {experiment}: convergence at equal work\n\nPaper: {PAPER[experiment]}.\n"
    for task, group in by(lines, "task").items():
        runs, rows = chosen(group), []
        for method, found in runs.items():
            price = price_of(prices, experiment, task, method)
            cells = [method, f"{found[0]['lr']:g}", str(len(found)), f"{price['price']:.2f}x"]
            for part in range(len(PARTS)):
                cells += gain(found, runs["SGD"], part, price).tell()
            rows.append([*cells, final_loss(found)])
        head = ["method", "lr", "seeds", "a step"]
        for goal in goals(runs["SGD"]):
            head += [f"steps to {goal:.3g}", "gain in time"]
        text += f"\n### {task}, {size(group[0])}, {seeds_of(runs['SGD'])}\n\n"
        text += table([*head, "final loss"], rows)
    return text


def races(results: Mapping[str, list[Line]], prices: list[Line]) -> dict[str, Any]:
    """Mean curves of all races, with time in steps of SGD."""
    found: dict[str, Any] = {}
    for experiment in RACES:
        for task, group in by(results.get(experiment, []), "task").items():
            curves = {}
            for method, runs in chosen(group).items():
                if method in DRAWN:
                    price = price_of(prices, experiment, task, method)
                    curve = mean_curve(runs)
                    steps = np.array(curve["iteration"])
                    curves[method] = curve | {"time": price["start"] + price["price"] * steps}
            found[f"{experiment}, {task}"] = curves
    return found


def price_of(prices: list[Line], experiment: str, task: str, method: str) -> Line:
    """Find what a step of a method costs on a task."""
    key = (experiment, task, method)
    return next(p for p in prices if (p["experiment"], p["task"], p["method"]) == key)


def gains(
    results: Mapping[str, list[Line]], prices: list[Line]
) -> dict[str, dict[str, list[Gain]]]:
    """Gains over SGD by race and method, one for each part of SGD's run."""
    found: dict[str, dict[str, list[Gain]]] = {}
    for experiment in RACES:
        for task, group in by(results.get(experiment, []), "task").items():
            runs = chosen(group)
            found[f"{experiment}, {task} ({seeds_of(runs['SGD'])})"] = {
                method: [
                    gain(own, runs["SGD"], part, price_of(prices, experiment, task, method))
                    for part in range(len(PARTS))
                ]
                for method, own in runs.items()
            }
    return found


def in_short(found: Mapping[str, Mapping[str, Sequence[Gain]]]) -> str:
    """Gains in time over SGD, all tasks on one page."""
    rows = [
        [race, *(" / ".join(g.brief() for g in methods.get(name, ())) for name in SHORT)]
        for race, methods in found.items()
    ]
    return (
        "## In short\n\nGain in time over SGD (median over seeds; above 1 is faster) on the way "
        f"to the losses of SGD after\n{', '.join(f'{p:.0%}' for p in PARTS)} of its run; `never` "
        "where half of the seeds or more do not get there. The paper: up to 1.6x\nfor PGD-A.\n\n"
        + table(["race", *SHORT.values()], rows)
        + verdict(found)
    )


def verdict(found: Mapping[str, Mapping[str, Sequence[Gain]]]) -> str:
    """Say where the default is slower than SGD, and where it is faster."""
    text = "\n"
    cells = [(race, m, p) for race, m in found.items() if DEFAULT in m for p in range(len(PARTS))]
    for told, field in (("In steps", "in_steps"), ("In time", "in_time")):
        medians = {
            (race, part): float(np.median(getattr(methods[DEFAULT][part], field)))
            for race, methods, part in cells
        }
        slower = [
            f"{race.split(' (')[0]} at {PARTS[part]:.0%} ({value:.2f}x)"
            for (race, part), value in medians.items()
            if value < 1 - SAME
        ]
        faster = sum(value > 1 + SAME for value in medians.values())
        text += (
            f"{told} the default is more than {SAME:.0%} faster than SGD in {faster} of "
            f"{len(medians)} cells and more than {SAME:.0%} slower in {len(slower)}"
            f"{': ' + ', '.join(slower) if slower else ''}.\n"
        )
    return text


def sweep(lines: list[Line], experiment: str) -> str:
    """Tabulate final and worst losses over a grid of k and r."""
    text = f"## {experiment}\n\nPaper: {PAPER[experiment]}.\n"
    for task, group in by(lines, "task").items():
        rows = []
        for runs in by(group, "method", "top", "renewal").values():
            top, renewal, method = (runs[0][key] for key in ("top", "renewal", "method"))
            losses = mean_curve(runs)["loss"]
            rise = max((b - a for a, b in pairwise(losses)), default=0.0)
            rows.append(
                [method, f"{top:.1%}", f"{renewal:.1%}", f"{losses[len(losses) // 2]:.3f}",
                 final_loss(runs), f"{max(rise, 0):.3f}"]
            )  # fmt: skip
        head = ("method", "k", "r", "loss half-way", "final loss", "largest rise")
        told = f"{group[0]['iterations']} steps, lr {group[0]['lr']:g}"
        told += f", {seeds_of(group)}"
        text += f"\n### {task}, N = {group[0]['samples']}, {told}\n\n" + table(head, rows)
    return text


def scaling(lines: list[Line]) -> str:
    """Virtual time to one loss over the number of nodes (Figure 11)."""
    rows = []
    for (task, rule, link), group in by(lines, "task", "rule", "link_mbps").items():
        first = {line["seed"]: line for line in group if line["nodes"] == 1}
        cells = [task, rule, f"{link / 1000:g} Gbit/s"]
        for fleet in by(group, "nodes").values():
            if any(line["speedup"] is None for line in fleet):
                cells.append("never")
                continue
            alone = first[fleet[0]["seed"]]
            a_round = alone["virtual_s"] / alone["rounds"] * fleet[0]["rounds"]
            speedup, rounds = (joined(fleet, key) for key in ("speedup", "rounds"))
            cells.append(f"{speedup}x ({rounds}; {a_round / fleet[0]['virtual_s']:.2f}x)")
        rows.append([*cells, joined(list(first.values()), "loss")])
    counts = by(lines, "nodes")
    head = ["task", "rule", "link", *(f"{n} node{'s' * (n > 1)}" for n in counts), "loss"]
    return (
        "## Scaling (Figure 11; paper: linear)\n\nSpeed-up of the virtual time to the same "
        "training loss over one node; in brackets the rounds it\ntook (looked at every 5) and "
        "the speed-up of a single round. Nodes take one step on their share of\nthe batch, then "
        "the server averages; a round lasts as long as compute "
        f"({lines[0]['ms_per_example']:g} ms an example) and transfer\nof the model. "
        f"{seeds_of(lines)}, one figure each.\n\n" + table(head, rows)
    )


def joined(lines: Sequence[Line], key: str) -> str:
    """Figures of all seeds, side by side; one if they are all alike."""
    return ", ".join(dict.fromkeys(f"{line[key]:.3g}" for line in lines))


def size(line: Line) -> str:
    return f"N = {line['samples']}, k = {line['top']:.1%}, r = {line['renewal']:.1%}"


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


SETTING = """All training runs on one thread of a CPU with torch {torch}, every method at the same
number of examples per step. SGD and the biased methods take the learning rate that served each
best with the first seed (rates tried: see `run.py`); the unbiased rules take SGD's. Targets are
losses over all training examples that the mean of SGD's runs has at some parts of them, after a
least-squares fit of a curve that never rises to each run. Every seed's steps are held against
the median of SGD's same seeds, so that the row of SGD shows what chance alone does. A step's
price is CPU time over that of SGD's step, measured side by side (`prices.py`), so that time is
steps times price (of the default quarter by quarter of the run), plus the full first pass where
there is one. In the tables: median over seeds, in brackets the least and the greatest; ± is the
standard deviation over seeds. The default's prices on the CNN and in `late` were measured while it
looked at one batch in 16 with the gate closed; it looks at one in 64 now, so that they are
upper bounds. All
prices come from a busy machine and scatter by some hundredths.

```bash
python benchmarks/pgd/cost.py
python benchmarks/pgd/shares.py --fashion FOLDER
python benchmarks/pgd/run.py --fashion FOLDER
python benchmarks/pgd/prices.py --fashion FOLDER
python benchmarks/pgd/scaling.py --fashion FOLDER
python benchmarks/pgd/report.py
```

FOLDER holds Fashion-MNIST as `train.parquet` and `test.parquet`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE)
    folder = parser.parse_args().folder
    results = by(read(folder / "results.jsonl"), "experiment")
    prices = read(folder / "prices.jsonl")
    every = [line for lines in results.values() for line in lines]
    text = "# PGD\n\nMade by `report.py` from the json lines beside it.\n\n"
    text += SETTING.format(torch=every[0]["torch"]) + in_short(gains(results, prices))
    text += "\n![Training loss](races.png)\n\n"
    draw_races(races(results, prices), folder / "races.png")
    text += cost(read(folder / "cost.jsonl")) + "\n"
    if lines := read(folder / "shares.jsonl"):
        text += shares(lines) + "\n"
        draw_shares(lines, folder / "shares.png")
    for experiment, lines in results.items():
        if experiment in SWEEPS:
            text += sweep(lines, experiment) + "\n"
        else:
            text += race(lines, prices, experiment) + "\n"
    if lines := read(folder / "scaling.jsonl"):
        text += scaling(lines) + "\n"
    wanted = {(name, case["task"]) for name, cases in EXPERIMENTS.items() for case in cases()}
    if missing := wanted - {(line["experiment"], line["task"]) for line in every}:
        told = ", ".join(f"{name} on {task}" for name, task in sorted(missing))
        text += f"Written, but not run yet: {told} (`run.py`).\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
