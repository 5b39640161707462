"""Turn the json lines of this folder into ``report.md`` and figures; never trains.

Usage: ``python benchmarks/pgd/report.py [--folder FOLDER]``. Files that are missing are left out.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from curves import Line, by, final_loss, least, mean_curve, targets, to_target
from figures import draw_curves, draw_shares

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
CLOCKS = ("iteration", "seconds")
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
        "resident memory in a process of its\nown. Error: largest in single precision, 8 examples, "
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


def convergence(lines: list[Line], experiment: str, folder: Path) -> str:
    """Tabulate iterations and time to a loss, each method at its best learning rate."""
    text = f"## {experiment}: convergence at equal work\n\nPaper: {PAPER[experiment]}.\n"
    for task, group in by(lines, "task").items():
        chosen = {m: least(runs) for m, runs in by(group, "method").items()}
        goals = targets(chosen["SGD"])
        rows = []
        for method, runs in chosen.items():
            cells = [method, f"{runs[0]['lr']:g}"]
            for goal in goals:
                cells += [to_target(runs, chosen["SGD"], goal, clock) for clock in CLOCKS]
            rows.append([*cells, final_loss(runs)])
        head = ["method", "lr"]
        for goal in goals:
            head += [f"steps to {goal:.3g}", f"CPU s to {goal:.3g}"]
        text += f"\n### {task}, {size(group[0])}\n\n" + table([*head, "final loss"], rows)
        name = f"{experiment}-{task}.png"
        draw_curves({m: mean_curve(r) for m, r in chosen.items()}, folder / name, task)
        text += f"\n![{task}]({name})\n"
    return text


def sweep(lines: list[Line], experiment: str, folder: Path) -> str:
    """Tabulate final and worst losses over a grid of k and r."""
    text = f"## {experiment}\n\nPaper: {PAPER[experiment]}.\n"
    for task, group in by(lines, "task").items():
        rows, curves = [], {}
        for runs in by(group, "method", "top", "renewal").values():
            top, renewal, method = (runs[0][key] for key in ("top", "renewal", "method"))
            curve = mean_curve(runs)
            bumps = max((b - a for a, b in zip(curve["loss"], curve["loss"][1:], strict=False)))
            half = len(curve["loss"]) // 2
            rows.append(
                [method, f"{top:.1%}", f"{renewal:.1%}", f"{curve['loss'][half]:.3f}",
                 final_loss(runs), f"{max(bumps, 0):.3f}"]
            )  # fmt: skip
            curves[f"{method} k={top:.1%} r={renewal:.1%}"] = curve
        head = ("method", "k", "r", "loss half-way", "final loss", "largest rise")
        text += f"\n### {task}\n\n" + table(head, rows)
        name = f"{experiment}-{task}.png"
        draw_curves(curves, folder / name, task)
        text += f"\n![{task}]({name})\n"
    return text


def scaling(lines: list[Line]) -> str:
    """Virtual time to one loss over the number of nodes (Figure 11)."""
    rows = []
    for line in lines:
        seconds = line["virtual_s"]
        rows.append([line["task"], line["rule"], f"{line['link_mbps'] / 1000:g} Gbit/s",
                     str(line["nodes"]), f"{line['loss']:.3f}",
                     "never" if seconds is None else f"{seconds:.2f}",
                     "" if line["speedup"] is None else f"{line['speedup']:.2f}x",
                     str(line["rounds"] or "")])  # fmt: skip
    head = ("task", "rule", "link", "nodes", "loss", "virtual s to it", "speed-up", "rounds")
    return "## Scaling (Figure 11; paper: linear)\n\n" + table(head, rows)


def size(line: Line) -> str:
    return f"N = {line['samples']}, k = {line['top']:.1%}, r = {line['renewal']:.1%}"


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE)
    folder = parser.parse_args().folder
    text = "# PGD: measured\n\n"
    if lines := read(folder / "cost.jsonl"):
        text += cost(lines) + "\n"
    if lines := read(folder / "shares.jsonl"):
        text += shares(lines) + "\n"
        draw_shares(lines, folder / "shares.png")
    for experiment, lines in by(read(folder / "results.jsonl"), "experiment").items():
        write = sweep if experiment in SWEEPS else convergence
        text += write(lines, experiment, folder) + "\n"
    if lines := read(folder / "scaling.jsonl"):
        text += scaling(lines)
    (folder / "report.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
