"""How costs grow with the fleet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line, metric


def growth(lines: Sequence[Line], name: str) -> float:
    nodes = np.log([line["case"]["nodes"] for line in lines])
    return float(np.polyfit(nodes, np.log(metric(lines, name)), 1)[0])


def scale_table(groups: dict[str, list[Line]]) -> tuple[str, float]:
    """Tabulate time and memory by strategy and number of nodes, and return the steepest growth."""
    rows = []
    exponents = []
    for name, lines in groups.items():
        sizes = [f"{line['case']['nodes']:,} nodes" for line in lines]
        metrics = [line["metrics"] for line in lines]
        times = [f"{1e3 * m['round_s']:.1f}" for m in metrics]
        exponents.append(growth(lines, "round_s"))
        rows.append([name, "ms a round", *times, f"{exponents[-1]:.2f}"])
        memory = [f"{m['grid_mb'] + m['run_mb']:.1f}" for m in metrics]
        rows.append(["", "MB", *memory, ""])
        # Only a strategy that profiles takes any time before its first round.
        if metrics[-1]["start_s"] > 0.05:
            exponents.append(growth(lines, "start_s"))
            start = [f"{m['start_s']:.2f}" for m in metrics]
            rows.append(["", "s to profile all", *start, f"{exponents[-1]:.2f}"])
    head = ["strategies", "figure", *sizes, "growth e"]
    return tables.table(head, rows) + "\n", max(exponents)


def drift(groups: dict[str, list[Line]]) -> str:
    """Say whether late rounds cost more than early ones in the largest fleet."""
    texts = []
    for name, lines in groups.items():
        m = lines[-1]["metrics"]
        ratio = m["second_half_s"] / m["first_half_s"]
        texts.append(f"{name} {ratio:.2f}, {1e3 * m['mb_per_round']:.0f} kB")
    head = "CPU time of late rounds over early ones, and more memory a round, largest fleet"
    return f"{head}: {'; '.join(texts)}.\n\n"


def scale(lines: list[Line]) -> dict[str, Any]:
    every = [line for line in lines if line["case"]["cohort"] == line["case"]["nodes"]]
    some = [line for line in lines if line not in every]
    text = ""
    steepest = 0.0
    for chosen, title in (
        (some, "{cohort} nodes train a round"),
        (every, "All nodes train a round"),
    ):
        groups = record.by(chosen, "strategy")
        if not groups or min(map(len, groups.values())) < 2:
            continue
        table, exponent = scale_table(groups)
        text += f"### {title}, {{rounds}} rounds\n\n".format(**chosen[0]["case"]) + table
        if chosen is some:
            text += drift(groups)
        steepest = max(steepest, exponent)
    # The limit is half-way between linear and quadratic.
    verdict = "nothing is quadratic" if steepest < 1.5 else "SOMETHING GROWS TOO FAST"
    return {"scale": text, "steepest": steepest, "verdict": verdict} if text else {}


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    scales = record.of(lines, experiment="scale")
    software = record.software(scales, "flwr", "torch", "python", "machine")
    return {"software": software, **scale(scales)}
