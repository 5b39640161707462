"""Accuracy at equal work or equal time."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line, metric
from flwr_hetero_studies.papers.report import coverage

HEAD = ["case", "epochs", "rounds", "virtual s", "accuracy %"]
SHOWN = ["case", "virtual s", "accuracy %"]
FIGURES = {"epochs": ".1f", "rounds": ".0f", "virtual_s": ".1f"}


def rows_of(lines: Sequence[Line]) -> list[list[str]]:
    rows = []
    for name, group in record.by(lines, "name").items():
        means = [f"{mean(metric(group, key)):{form}}" for key, form in FIGURES.items()]
        percents = [100 * accuracy for accuracy in metric(group, "accuracy")]
        rows.append([name, *means, tables.spread(percents, ".2f", ".2f")])
    return rows


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    rows = {name: rows_of(own) for name, own in record.by(lines, "experiment").items()}
    parts: dict[str, Any] = {n: tables.only(SHOWN, HEAD, own) for n, own in rows.items()}
    parts["in_full"] = "\n".join(tables.table(HEAD, own) for own in rows.values())
    versions = record.software(lines, "flwr", "torch", "numpy")
    about = {"case": lines[0]["case"], "seeds": len(record.seeds(lines)), "versions": versions}
    return parts | about | coverage("biased-local-sgd")
