"""What methods cost the server, by fleet and by model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.cost.scale import USUAL, WIDE

BASE = "FedAvg"
JOB_S = 60.0
"""Seconds for which a node trains, in the estimate of how far one server goes."""
Costs = dict[tuple[str, int], dict[str, float]]
"""What was measured, by strategy and size of the fleet."""


def costs_by(lines: Sequence[Line], key: str) -> Costs:
    return {(line["case"]["strategy"], line["case"][key]): line["metrics"] for line in lines}


def cell(costs: Costs, strategy: str, size: int) -> str:
    """Write milliseconds, and how many times those of FedAvg in the same fleet they are."""
    if (strategy, size) not in costs:
        return ""
    reply_ms = costs[strategy, size]["reply_ms"]
    base = costs.get((BASE, size))
    if strategy == BASE or base is None:
        return f"{reply_ms:.2f}"
    return f"{reply_ms:.2f} ({reply_ms / base['reply_ms']:.1f})"


def rows_of(costs: Costs, sizes: Sequence[int]) -> list[list[str]]:
    strategies = dict.fromkeys(strategy for strategy, _ in costs)
    return [[name, *(cell(costs, name, size) for size in sizes)] for name in strategies]


def by_nodes(costs: Costs) -> str:
    """Tabulate fleets by their number of nodes, with the growth from the smallest one."""
    sizes = sorted({nodes for _, nodes in costs})
    rows = rows_of(costs, sizes)
    for row in rows:
        known = [costs[row[0], size] for size in sizes if (row[0], size) in costs]
        growth = known[-1]["reply_ms"] / known[0]["reply_ms"]
        row += [f"{growth:.2f}", f"{known[-1]['pass_ms']:.2f}"]
    head = [f"{nodes:,} nodes" for nodes in sizes]
    return tables.table(["strategy", *head, "growth", "first pass"], rows)


def by_training(costs: Costs) -> str:
    """Tabulate fleets of one size by how many of their nodes train at a time."""
    sizes = sorted({training for _, training in costs})
    head = [f"{training} train" for training in sizes]
    return tables.table(["strategy", *head], rows_of(costs, sizes))


def limits(costs: Costs) -> dict[str, Any]:
    """Return how far one server goes under FedSlice, by its cost in the largest fleet."""
    largest = max(nodes for _, nodes in costs)
    reply_ms = costs["FedSlice", largest]["reply_ms"]
    per_s = 1e3 / reply_ms
    nodes = int(round(JOB_S * per_s, -3))
    return {"fedslice_ms": reply_ms, "fedslice_per_s": per_s, "fedslice_nodes": nodes}


def models_table(lines: Sequence[Line]) -> str:
    """Tabulate peak memory and CPU time by strategy and size of the model."""
    found = record.by(lines, "strategy", "parameters", "nodes")
    sizes = sorted({(parameters, nodes) for _, parameters, nodes in found})
    rows = []
    for strategy in dict.fromkeys(strategy for strategy, *_ in found):
        row = [strategy]
        for size in sizes:
            metrics = [line["metrics"] for line in found.get((strategy, *size), ())]
            row.append(", ".join(f"{x['copies']:.1f}, {x['ns']:.1f}" for x in metrics))
        rows.append(row)
    head = [f"{parameters // 10**6} million, {nodes} nodes" for parameters, nodes in sizes]
    return tables.table(["strategy", *head], rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    scales = record.of(lines, experiment="scale")
    usual = costs_by(record.of(scales, training=USUAL), "nodes")
    if not usual:
        return {}
    software = record.software(scales, "flwr", "torch", "python", "machine")
    return {
        "software": software,
        "emulated": by_nodes(usual),
        "by_training": by_training(costs_by(record.of(scales, nodes=WIDE), "training")),
        "models": models_table(record.of(lines, experiment="models")),
    } | limits(usual)
