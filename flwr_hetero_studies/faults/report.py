"""What faults cost, what lies gain, and predicted against real seconds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.faults.liars import HONEST, LIES, STRATEGIES

FAULT = ["fault", "injected", "run survived", "replies lost", "rounds lost", "seconds lost",
         "lost later", "what the history says"]  # fmt: skip
GAIN = ["lie", "strategy", "seeds", "share", "steps", "accuracy", "honest"]
MOVED = ["lie", "strategy", "moved by one liar of 20, share", "by three"]
MOST_LOST = {1: 0.03, 3: 0.10}
"""What liars, by their number, may cost before a cell is bold."""
ENGINES = {"engine": "{engine}", "predicted": "{predicted_s:.0f} s", "real": "{real_s:.0f} s",
           "difference": "{more:+.0%}", "predicted error": "{predicted_error:.2f}",
           "real error": "{real_error:.2f}", "failures": "{failures}"}  # fmt: skip


def process(lines: Sequence[Line]) -> dict[str, Any]:
    faults = [fault for line in lines for fault in line["metrics"]["faults"]]
    loads = record.metric(lines, "load")
    usual = sorted({fault["usual_round_s"] for fault in faults if "usual_round_s" in fault})
    rows = []
    for fault in faults:
        reason = fault.get("error") or fault.get("reason")
        says = "; ".join(filter(None, [reason and f"`{reason}`", fault.get("note")]))
        survived = "yes" if fault["survived"] else "**no**"
        cells = [fault["fault"], fault.get("injected", ""), survived]
        lost = ("replies_lost", "rounds_lost", "seconds_lost", "lost_later")
        rows.append([*cells, *(fault.get(key, "") for key in lost), says.replace("|", "/")])
    parts = {"process": tables.table(FAULT, rows), "cores": lines[0]["metrics"]["cores"]}
    parts["usual"] = f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none"
    return parts | {"low": min(loads), "high": max(loads)}


def warm(lines: Sequence[Line]) -> dict[str, Any]:
    found = process(lines)
    return {f"warm_{name}": found[name] for name in ("process", "usual", "low", "high")}


def influence(lines: Sequence[Line]) -> dict[str, Any]:
    rows = []
    for (name, liars), own in record.by(lines, "name", "liars").items():
        wrapper, _, lie = name.partition(": ")
        if lie != "honest":
            # with the same seeds
            both = record.pairs(own, record.of(lines, name=f"{wrapper}: honest"))
            honest = tables.percent(mean(base["metrics"]["accuracy"] for _, base in both))
            of = lie if liars == 1 else f"{lie}, six nodes"
            rows.append([of, wrapper, len(own), *cells_of(own, lie), honest])
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    return {"influence": tables.table(GAIN, rows)}


def cells_of(lines: Sequence[Line], lie: str) -> list[str]:
    """Write the liars' share or, of silent nodes, the time; the others' steps; the accuracy."""
    means = {n: mean(record.metric(lines, n)) for n in ("virtual_s", "share", "accuracy", "ended")}
    share = f"{means['virtual_s']:.0f} s" if lie == "never answers" else f"{means['share']:.3f}"
    accuracy = tables.percent(means["accuracy"]) if means["ended"] == 1 else "**run lost**"
    steps = [count for count in record.metric(lines, "steps") if count is not None]
    return [share, f"{mean(steps):.1f}" if steps else "", accuracy]


def liars(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate accuracies with one and three liars; by itself how far the model is moved."""
    found, rows, full = record.by(lines, "name", "liars"), [], []
    for strategy in STRATEGIES:
        if (base := found.get((f"{strategy}: {HONEST}", 0))) is None:
            continue
        honest = mean(record.metric(base, "accuracy"))
        rows.append([strategy, f"{100 * honest:.1f}"])
        for lie in (lie for lie in LIES if lie != HONEST):
            among = [found[f"{strategy}: {lie}", count] for count in MOST_LOST]
            rows[-1].append(" / ".join(accuracy_of(own, honest) for own in among))
            full.append([lie, strategy, *map(moved_by, among)])
    parts = {"liars": tables.table(["strategy", *LIES], rows)}
    parts["liars_moved"] = tables.table(MOVED, full)
    return parts | {"liars_seeds": len(record.seeds(lines))}


def accuracy_of(lines: Sequence[Line], honest: float) -> str:
    """Write the accuracy in percent, bold if far below that without liars."""
    if not all(record.metric(lines, "ended")):
        return "**run lost**"
    accuracy = mean(record.metric(lines, "accuracy"))
    far = honest - accuracy > MOST_LOST[lines[0]["case"]["liars"]]
    return f"**{100 * accuracy:.1f}**" if far else f"{100 * accuracy:.1f}"


def moved_by(lines: Sequence[Line]) -> str:
    """Write how far liars move the model, and their share of the weights."""
    shares = [share for share in record.metric(lines, "share") if share is not None]
    moved = f"{mean(record.metric(lines, 'displacement')):.2g}"
    return moved + (f", {mean(shares):.0%}" if shares else "")


def engines(lines: Sequence[Line]) -> dict[str, Any]:
    m = lines[0]["metrics"]
    rows = [[form.format(**row, more=row["real_s"] / row["predicted_s"] - 1)
             for form in ENGINES.values()] for row in m["rows"]]  # fmt: skip
    constants = ", ".join(f"{seconds:.1f}" for seconds in m["constant_s"].values())
    parts = {"engines_constants": constants, "engines_load": m["load"]}
    return parts | {"engines": tables.table(list(ENGINES), rows)}


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    tabulate = {"process": process, "warm": warm, "influence": influence,
                "liars": liars, "engines": engines}  # fmt: skip
    for name, own in record.by(lines, "experiment").items():
        parts[f"{name}_versions"] = record.software(own, "flwr", "python")
        parts[f"{name}_case"] = own[0]["case"]
        parts |= tabulate[name](own)
    return parts
