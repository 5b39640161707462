"""What faults cost, and what liars cost."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.faults.liars import COUNTS, FACTORS, STRATEGIES
from flwr_hetero_studies.faults.scenarios import KINDS

COSTS = ["fault", "costs with Flower's node", "with a warm node"]
STARTS = ["fault", "what the history or log says"]
WORST = ["strategy", "one liar of 20 costs, points", "three cost"]


def facts(lines: Sequence[Line], prefix: str = "") -> dict[str, Any]:
    """Return the usual seconds of a round, and the machine's cores and load."""
    faults = faults_in(lines).values()
    usual = sorted({fault["usual_round_s"] for fault in faults if "usual_round_s" in fault})
    loads = record.metric(lines, "load")
    return {
        f"{prefix}usual": f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none",
        f"{prefix}low": min(loads),
        f"{prefix}high": max(loads),
        f"{prefix}cores": lines[0]["metrics"]["cores"],
    }


def faults_in(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    return {fault["fault"]: fault for line in lines for fault in line["metrics"]["faults"]}


def processes(cold_lines: Sequence[Line], warm_lines: Sequence[Line]) -> dict[str, str]:
    """Tabulate what most faults cost, and what is in the logs of nodes that end."""
    cold = faults_in(cold_lines)
    warm = faults_in(warm_lines)
    # Those of a kind that the page has in words have no row.
    names = [name for name in cold | warm if name not in KINDS.values()]
    starts = [name for name in names if "cost" in cold.get(name, {})]
    costly = [name for name in names if name not in starts]
    rows = [
        [name, *(costs(faults[name]) if name in faults else "" for faults in (cold, warm))]
        for name in costly
    ]
    said = [[name, said_of(cold[name], warm.get(name, {})).replace("|", "/")] for name in starts]
    return {"process_costs": tables.table(COSTS, rows), "starts": tables.table(STARTS, said)}


def said_of(cold: dict[str, Any], warm: dict[str, Any]) -> str:
    """Write what the log of a node says, and of a warm one if only one of them has an error."""
    text = explained(cold)
    if warm and ("reason" in cold) != ("reason" in warm):
        text += f"; warm: {explained(warm)}"
    return text


def explained(fault: dict[str, Any]) -> str:
    reason = fault.get("reason")
    return f"`{reason}`; {fault['note']}" if reason else str(fault["note"])


def costs(fault: dict[str, Any]) -> str:
    """Write what a fault cost: replies at once and later, rounds, and seconds."""
    if not fault["survived"]:
        return "**run lost**"
    replies = fault.get("replies_lost", 0) + fault.get("lost_later", 0)
    counts = (replies, "reply", "replies"), (fault.get("rounds_lost", 0), "round", "rounds")
    lost = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
    seconds = fault.get("seconds_lost")
    if seconds:
        lost.append(f"{seconds:.1f} s")
    return ", ".join(lost) or "nothing"


def worst(lines: Sequence[Line]) -> str:
    """Tabulate how many points the worst factor of early, turned updates costs."""
    groups = record.by(lines, "strategy", "liars", "factor")
    rows = []
    for strategy in STRATEGIES:
        honest = groups.get((strategy, 0, 1.0), [])
        cells = []
        for count in COUNTS:
            points = {}
            for factor in FACTORS:
                pairs = record.pairs(groups.get((strategy, count, factor), []), honest)
                if pairs:
                    points[factor] = [
                        100 * (base["metrics"]["accuracy"] - line["metrics"]["accuracy"])
                        for line, base in pairs
                    ]
            if points:
                factor = max(points, key=lambda factor: mean(points[factor]))
                cells.append(f"{tables.extent(points[factor], '{:.1f}')}, x {factor:g}")
        rows.append([strategy, *cells])
    return tables.table(WORST, rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    parts: dict[str, Any] = {}
    for name, runs in groups.items():
        parts[f"{name}_versions"] = record.software(runs, "flwr", "python")
    if "process" in groups:
        parts |= facts(groups["process"])
        parts |= processes(groups["process"], groups.get("warm", []))
    if "warm" in groups:
        parts |= facts(groups["warm"], "warm_")
    if "liars" in groups:
        liars = groups["liars"]
        parts |= {"liars_worst": worst(liars), "liars_seeds": len(record.seeds(liars))}
        parts["liars_rounds"] = liars[0]["case"]["rounds"]
    return parts
