"""Accuracy at equal work or equal time."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line, metric

HEAD = ["case", "epochs", "rounds", "virtual s", "accuracy %"]


def deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else float("nan")


def accuracy(lines: Sequence[Line]) -> str:
    values = metric(lines, "accuracy")
    return f"{100 * mean(values):.2f} ± {100 * deviation(values):.2f}"


def table(lines: Sequence[Line]) -> str:
    """Write a row per case, mean over seeds."""
    rows = []
    for name, group in record.by(lines, "name").items():
        epochs, rounds, virtual_s = (
            mean(metric(group, key)) for key in ("epochs", "rounds", "virtual_s")
        )
        rows.append([name, f"{epochs:.1f}", f"{rounds:.0f}", f"{virtual_s:.1f}", accuracy(group)])
    return tables.table(HEAD, rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page."""
    parts: dict[str, Any] = {n: table(own) for n, own in record.by(lines, "experiment").items()}
    versions = record.software(lines, "flwr", "torch", "numpy")
    about = {"case": lines[0]["case"], "seeds": len(record.seeds(lines)), "versions": versions}
    return parts | about
