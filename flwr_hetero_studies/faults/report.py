"""What faults cost, what lies gain, and predicted against real seconds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line

FAULT = ["fault", "injected", "run survived", "replies lost", "rounds lost", "seconds lost",
         "lost later", "what the history says"]  # fmt: skip
GAIN = ["lie", "strategy", "seeds", "share, off", "steps, off", "accuracy, off", "share, on",
        "steps, on", "accuracy, on"]  # fmt: skip
ENGINES = ["engine", "predicted", "real", "difference", "predicted error", "real error",
           "failures"]  # fmt: skip


def process(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate the faults of real processes."""
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
    return {
        "process": tables.table(FAULT, rows),
        "low": min(loads),
        "high": max(loads),
        "cores": lines[0]["metrics"]["cores"],
        "usual": f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none",
    }


def influence(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate what lies gain without and with the checks, and what these cost honest runs."""
    shares, honest = [], []
    for (name, liars), own in record.by(lines, "name", "liars").items():
        wrapper, _, lie = name.partition(": ")
        off, on = record.of(own, checks="off"), record.of(own, checks="on")
        if lie == "honest" and off:
            off = record.of(own, checks="before") or off
            pairs = record.pairs(on, off)
            lost = [100 * (b["metrics"]["accuracy"] - a["metrics"]["accuracy"]) for a, b in pairs]
            accuracy = [tables.percent(mean(record.metric(x, "accuracy"))) for x in (off, on)]
            if lost:
                honest.append([wrapper, len(lost), *accuracy, tables.extent(lost, "{:+.1f}")])
            continue
        cells = [cell for version in (off, on) for cell in cells_of(version, lie)]
        seeds = len(record.seeds(on)) if on else len(record.seeds(off))
        shares.append([lie if liars == 1 else f"{lie}, six nodes", wrapper, seeds, *cells])
    order = {row[0]: i for i, row in reversed(list(enumerate(shares)))}
    shares.sort(key=lambda row: order[row[0]])
    return {
        "influence": tables.table(GAIN, shares),
        "honest": tables.table(["strategy", "seeds", "off", "on", "points lost"], honest),
    }


def cells_of(lines: Sequence[Line], lie: str) -> list[str]:
    """Write the liars' share or, of silent nodes, the time; the others' steps; the accuracy."""
    if not lines:
        return [""] * 3
    means = {n: mean(record.metric(lines, n)) for n in ("virtual_s", "share", "accuracy", "ended")}
    share = f"{means['virtual_s']:.0f} s" if lie == "never answers" else f"{means['share']:.3f}"
    accuracy = tables.percent(means["accuracy"]) if means["ended"] == 1 else "**run lost**"
    steps = [count for count in record.metric(lines, "steps") if count is not None]
    return [share, f"{mean(steps):.1f}" if steps else "", accuracy]


def engines(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate both engines on a real fleet and on the emulated one."""
    rows, m = [], lines[0]["metrics"]
    for row in m["rows"]:
        share = f"{row['real_s'] / row['predicted_s'] - 1:+.0%}"
        seconds = [f"{row['predicted_s']:.0f} s", f"{row['real_s']:.0f} s", share]
        errors = [f"{row['predicted_error']:.2f}", f"{row['real_error']:.2f}"]
        rows.append([row["engine"], *seconds, *errors, row["failures"]])
    constants = ", ".join(f"{seconds:.1f}" for seconds in m["constant_s"].values())
    return {
        "engines": tables.table(ENGINES, rows),
        "engines_constants": constants,
        "engines_load": m["load"],
    }


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page."""
    parts: dict[str, Any] = {}
    tabulate = {"process": process, "influence": influence, "engines": engines}
    for name, own in record.by(lines, "experiment").items():
        parts[f"{name}_versions"] = record.software(own, "flwr", "python")
        parts[f"{name}_case"] = own[0]["case"]
        parts |= tabulate[name](own)
    return parts
