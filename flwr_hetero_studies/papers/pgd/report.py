"""What priorities cost, beside the claims of the paper."""

from pathlib import Path
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.papers.report import coverage


def cost(lines: list[Line]) -> str:
    """Write ways by models: CPU time in milliseconds, and in those of forward and backward."""
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        for way in line["metrics"]["ways"]:
            text = "{ms:.1f} ({ratio:.2f}x)".format(**way)
            cells.setdefault(way["way"], {})[line["case"]["name"]] = text
    models = [line["case"]["name"] for line in lines]
    rows = [[way, *(texts.get(model, "") for model in models)] for way, texts in cells.items()]
    return tables.table(["way", *models], rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    parts = {"versions": record.software(lines, "torch"), "cost": cost(lines)}
    return parts | coverage("pgd")
