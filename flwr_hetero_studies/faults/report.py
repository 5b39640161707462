"""What faults cost, and what liars cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.faults.liars import HONEST, LIES, SCALED, SEARCHED, STRATEGIES
from flwr_hetero_studies.faults.scenarios import KINDS

FAULT = ["fault", "costs with Flower's node", "with a warm node", "what the history or log says"]
NO_START = "this node"
MOVED = ["lie", "strategy", "moved by one liar of 20, share", "by three"]
WORST = ["strategy", "one liar of 20 costs, points", "three cost"]
EARLY_LIE = "turned, early"
MOST_LOST = {1: 0.03, 3: 0.10}
"""Accuracy that liars, by their number, may cost before a cell is bold."""


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


def side_by_side(cold_lines: Sequence[Line], warm_lines: Sequence[Line]) -> list[list[str]]:
    """Write the faults with Flower's node, in this order, beside those with a warm node."""
    cold = faults_in(cold_lines)
    warm = faults_in(warm_lines)
    rows = []
    for name in cold | warm:
        cells = [costs(faults[name]) if name in faults else "" for faults in (cold, warm)]
        cold_reason, text = explained(cold.get(name, {}))
        warm_reason, warm_text = explained(warm.get(name, {}))
        # Both texts are needed where only one kind of node lost anything.
        if name in cold and name in warm and bool(cold_reason) != bool(warm_reason):
            text = f"{text}; warm: {warm_text}"
        text = text or warm_text
        rows.append([name, *cells, text.replace("|", "/")])
    return rows


def processes(cold: Sequence[Line], warm: Sequence[Line]) -> dict[str, str]:
    """Tabulate all faults, what most of them cost, and what is in the logs of nodes that end."""
    rows = side_by_side(cold, warm)
    starts = [row for row in rows if row[1] == NO_START]
    others = [row for row in rows if row not in starts and row[0] not in KINDS.values()]
    return {
        "process": tables.table(FAULT, rows),
        "process_costs": tables.only(FAULT[:3], FAULT, others),
        "starts": tables.only([FAULT[0], FAULT[3]], FAULT, starts),
    }


def explained(fault: dict[str, Any]) -> tuple[str, str]:
    """Return the reason of a fault's loss, and the reason with the note as one text."""
    reason = fault.get("error") or fault.get("reason") or ""
    return reason, "; ".join(filter(None, [reason and f"`{reason}`", fault.get("note")]))


def costs(fault: dict[str, Any]) -> str:
    """Write what a fault cost: replies at once and later, rounds, and seconds."""
    if not fault["survived"]:
        return "**run lost**"
    if "cost" in fault:
        return str(fault["cost"])
    replies = fault.get("replies_lost", 0) + fault.get("lost_later", 0)
    counts = (replies, "reply", "replies"), (fault.get("rounds_lost", 0), "round", "rounds")
    lost = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
    seconds = fault.get("seconds_lost")
    if seconds:
        lost.append(f"{seconds:.1f} s")
    return ", ".join(lost) or "nothing"


def liars(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate accuracies with one and three liars, and in the details how far the model moves."""
    groups = record.by(lines, "name", "liars")
    rows = []
    moved = []
    for strategy in STRATEGIES:
        base = groups.get((f"{strategy}: {HONEST}", 0))
        if base is None:
            continue
        honest = mean(record.metric(base, "accuracy"))
        row = [strategy, f"{100 * honest:.1f}"]
        for lie in (lie for lie in LIES if lie != HONEST):
            among = [groups[f"{strategy}: {lie}", count] for count in MOST_LOST]
            row.append(" / ".join(accuracy_of(runs, honest) for runs in among))
            moved.append([lie, strategy, *map(moved_by, among)])
        rows.append(row)
    return {
        "liars": tables.table(["strategy", *LIES], rows),
        "liars_moved": tables.table(MOVED, moved),
        "liars_worst": tables.table(WORST, worst(groups)),
        "liars_seeds": len(record.seeds(lines)),
    }


def worst(groups: Mapping[tuple[str, int], list[Line]]) -> list[list[str]]:
    """Write how many points the worst factor of early, turned updates costs."""
    factors = {EARLY_LIE: 1.0} | {lie: -change.scale for lie, change in SCALED.items()}
    rows = []
    for strategy in SEARCHED:
        honest = record.by_seed(groups.get((f"{strategy}: {HONEST}", 0), []))

        def lost(line: Line, honest: Mapping[int, Line] = honest) -> float:
            base = honest[line["seed"]]["metrics"]["accuracy"]
            return float(100 * (base - line["metrics"]["accuracy"]))

        cells = []
        for count in MOST_LOST:
            runs = {lie: groups.get((f"{strategy}: {lie}", count)) for lie in factors}
            points = {lie: [*map(lost, lines)] for lie, lines in runs.items() if lines}
            if len(points) == len(runs):
                lie = max(points, key=lambda lie: mean(points[lie]))
                cells.append(f"{tables.extent(points[lie], '{:.1f}')}, x {factors[lie]:g}")
        if len(cells) == len(MOST_LOST):
            rows.append([strategy, *cells])
    return rows


def accuracy_of(lines: Sequence[Line], honest: float) -> str:
    """Write the accuracy in percent, bold if far below that without liars."""
    if not all(record.metric(lines, "ended")):
        return "**run lost**"
    accuracy = mean(record.metric(lines, "accuracy"))
    text = f"{100 * accuracy:.1f}"
    is_far = honest - accuracy > MOST_LOST[lines[0]["case"]["liars"]]
    return f"**{text}**" if is_far else text


def moved_by(lines: Sequence[Line]) -> str:
    """Write how far liars move the model, and their share of the weights."""
    shares = [share for share in record.metric(lines, "share") if share is not None]
    moved = f"{mean(record.metric(lines, 'displacement')):.2g}"
    return moved + (f", {mean(shares):.0%}" if shares else "")


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    parts: dict[str, Any] = {}
    for name, runs in groups.items():
        parts[f"{name}_versions"] = record.software(runs, "flwr", "python")
        parts[f"{name}_case"] = runs[0]["case"]
    if "process" in groups:
        parts |= facts(groups["process"])
        parts |= processes(groups["process"], groups.get("warm", []))
    if "warm" in groups:
        parts |= facts(groups["warm"], "warm_")
    if "liars" in groups:
        parts |= liars(groups["liars"])
    return parts
