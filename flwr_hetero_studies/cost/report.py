"""What methods cost by fleet and model, and simulators."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line

BASE = "FedAvg"
JOB_S = 60.0
"""Seconds for which a node trains, in the estimate of how far one server goes."""


class ReplyCosts:
    """Milliseconds of a reply, by kind of fleet, strategy, nodes and nodes in training."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.found = {
            (case["kind"], case["strategy"], case["nodes"], case["training"]): line["metrics"]
            for line in lines
            for case in [line["case"]]
        }

    def strategies(self, kind: str) -> list[str]:
        return list(dict.fromkeys(strategy for found, strategy, *_ in self.found if found == kind))

    def cell(self, kind: str, strategy: str, nodes: int, training: int) -> str:
        """Write milliseconds, and how many times those of FedAvg in the same fleet they are."""
        metrics = self.found.get((kind, strategy, nodes, training))
        if metrics is None:
            return ""
        text = f"{metrics['reply_ms']:.2f}"
        base = self.found.get((kind, BASE, nodes, training))
        if strategy == BASE or base is None:
            return text
        return f"{text} ({metrics['reply_ms'] / base['reply_ms']:.1f})"

    def growth(self, kind: str, strategy: str, sizes: Sequence[int]) -> float:
        """Return the cost in the largest fleet over that in the smallest one."""
        costs_ms = [
            self.found[kind, strategy, nodes, 20]["reply_ms"]
            for nodes in sizes
            if (kind, strategy, nodes, 20) in self.found
        ]
        return float(costs_ms[-1] / costs_ms[0])

    def by_nodes(self, kind: str) -> str:
        """Tabulate a kind of fleet by its number of nodes."""
        sizes = sorted({nodes for found, _, nodes, _ in self.found if found == kind})
        rows = []
        for strategy in self.strategies(kind):
            cells = [self.cell(kind, strategy, nodes, 20) for nodes in sizes]
            passes_ms = [
                self.found[kind, strategy, nodes, 20]["pass_ms"]
                for nodes in sizes
                if (kind, strategy, nodes, 20) in self.found
            ]
            growth = f"{self.growth(kind, strategy, sizes):.2f}"
            rows.append([strategy, *cells, growth, f"{passes_ms[-1]:.2f}"])
        head = [f"{nodes:,} nodes" for nodes in sizes]
        return tables.table(["strategy", *head, "growth", "first pass"], rows)

    def by_training(self) -> str:
        """Tabulate emulated fleets of one size by how many of their nodes train at a time."""
        key = {(nodes, training) for _, _, nodes, training in self.found if training != 20}
        if not key:
            return ""
        nodes = max(nodes for nodes, _ in key)
        trained = [20, *sorted({training for _, training in key})]
        rows = [
            [strategy, *(self.cell("emulated", strategy, nodes, number) for number in trained)]
            for strategy in self.strategies("emulated")
        ]
        return tables.table(["strategy", *(f"{number} train" for number in trained)], rows)

    def limits(self) -> dict[str, Any]:
        """Return how far one server goes under FedSlice, in the fleet where a reply costs most."""
        found = [
            metrics["reply_ms"]
            for (kind, strategy, _, training), metrics in self.found.items()
            if (kind, strategy, training) == ("emulated", "FedSlice", 20)
        ]
        if not found:
            return {}
        reply_ms = max(found)
        per_s = 1e3 / reply_ms
        nodes = round(JOB_S * per_s, -3)
        return {"fedslice_ms": reply_ms, "fedslice_per_s": per_s, "fedslice_nodes": int(nodes)}


def models_table(lines: Iterable[Line]) -> str:
    """Tabulate peak memory and CPU time by strategy and size of the model."""
    found = {
        (case["strategy"], case["parameters"], case["nodes"]): line["metrics"]
        for line in lines
        for case in [line["case"]]
    }
    sizes = sorted({(parameters, nodes) for _, parameters, nodes in found})
    rows = []
    for strategy in dict.fromkeys(strategy for strategy, *_ in found):
        row = [strategy]
        for size in sizes:
            metrics = found.get((strategy, *size))
            row.append(f"{metrics['copies']:.1f}, {metrics['ns']:.1f}" if metrics else "")
        rows.append(row)
    head = [f"{parameters // 10**6} million, {nodes} nodes" for parameters, nodes in sizes]
    return tables.table(["strategy", *head], rows)


def renewal_table(lines: Iterable[Line]) -> str:
    """Tabulate accuracy on the way and at the end, by how often figures are renewed."""
    rows = []
    for name, runs in record.by(lines, "name").items():
        accuracy = zip(*(line["metrics"]["accuracy"] for line in runs), strict=True)
        points = [[100 * value for value in values] for values in accuracy]
        cells = [tables.spread(each, ".1f") for each in points]
        rows.append([name, *cells, tables.spread(record.metric(runs, "virtual_s"))])
    head = [f"after {part} of the rounds" for part in ("1/4", "1/2", "3/4")]
    return tables.table(["figures are renewed", *head, "at the end", "seconds"], rows)


def simulators_table(lines: Iterable[Line]) -> str:
    """Tabulate replies a second and CPU time of a reply by job and engine."""
    found = {(line["case"]["job"], line["case"]["engine"]): line["metrics"] for line in lines}
    engines = list(dict.fromkeys(engine for _, engine in found))
    rows = [
        [job, *(_speed(found.get((job, engine))) for engine in engines)]
        for job in dict.fromkeys(job for job, _ in found)
    ]
    return tables.table(["job", *engines], rows)


def _speed(metrics: dict[str, float] | None) -> str:
    if metrics is None:
        return ""
    return f"{metrics['replies_per_s']:.0f} a second, {metrics['cpu_ms']:.1f} ms"


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    scales = record.of(lines, experiment="scale")
    if not scales:
        return {}
    renewal = record.of(lines, experiment="renewal")
    models = record.of(lines, experiment="models")
    simulators = record.of(lines, experiment="simulators")
    costs = ReplyCosts(scales)
    parts = {
        kind.replace(" ", "_"): costs.by_nodes(kind)
        for kind, _ in groupby(sorted(line["case"]["kind"] for line in scales))
    }
    software = record.software(scales, "flwr", "torch", "python", "machine")
    parts |= {"software": software, "by_training": costs.by_training()}
    if renewal:
        parts["renewal"] = renewal_table(renewal)
    if models:
        parts["models"] = models_table(models)
    if simulators:
        parts["simulators"] = simulators_table(simulators)
    return parts | costs.limits()
