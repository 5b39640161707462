"""What faults cost, how the soaks went, what lies gain, and predicted against real seconds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.record import Line

SETTLED = 0.2
"""Part of the soak after which memory is compared: before it, nodes are still met for the first
time."""
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


def soak(lines: Sequence[Line], path: Path) -> dict[str, Any]:
    """Tabulate and draw the soaks."""
    panels: dict[str, dict[str, Any]] = {"memory": {}, "failures": {}}
    for line in lines:
        name, curve = line["case"]["name"], {k: np.array(v) for k, v in line["curve"].items()}
        done = curve["round"] / line["case"]["rounds"]
        failures = np.diff(curve["failures"]) / np.diff(curve["round"])
        panels["memory"][name] = (done, curve["resident_mb"])
        panels["failures"][name] = (done[1:], failures)
    labels = ("part of the run", ("resident MB", "failures a round"))
    plots.draw(panels, path, *labels, columns=1, size=(7, 2), ylim=(0, None))
    columns = [endured(line) for line in lines]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    return {"soak": tables.table(["what", *(line["case"]["name"] for line in lines)], rows)}


def endured(line: Line) -> dict[str, str]:
    """Say what came of a soak."""
    last, curve = line["metrics"], {k: np.array(v) for k, v in line["curve"].items()}
    late = curve["round"] >= SETTLED * last["round"]
    memory, settled = curve["resident_mb"][late], int(curve["round"][late][0])
    struck = {k.removeprefix("struck: "): n for k, n in last.items() if k.startswith("struck")}
    errors = [error for error in line["curve"]["error"] if error is not None]
    growth = 100 * (memory.max() / memory[0] - 1)
    return {
        "completed": f"{last['round']:,} of {line['case']['rounds']:,}",
        "hours on the fleet's clock": f"{last['virtual_h']:.1f}",
        "times a node was asked to train": f"{last['nodes asked']:,}",
        "struck among them": ", ".join(f"{number:,} {kind}" for kind, number in struck.items()),
        "failures in the history": f"{last['failures']:,}",
        "without a result": str(last["rounds without result"]),
        "mean error of the model, first to last": f"{errors[0]:.3f} to {errors[-1]:.3f}",
        "replies that nobody had fetched, in the middle and at the end": (
            f"{curve['pending'][len(curve['pending']) // 2]:,}, {last['pending']:,}"
        ),
        "resident memory after a fifth, the most after it, at the end": (
            f"{memory[0]:.1f} MB ({settled:,}), {memory.max():.1f} MB ({growth:+.1f} %), "
            f"{memory[-1]:.1f} MB"
        ),
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
    """Return the parts of the page; draw the figure."""
    parts: dict[str, Any] = {}
    for name, own in record.by(lines, "experiment").items():
        parts[f"{name}_versions"] = record.software(own, "flwr", "python")
        parts[f"{name}_case"] = own[0]["case"]
        if name == "soak":
            parts |= soak(own, folder / "soak.png")
        else:
            tabulate = {"process": process, "influence": influence, "engines": engines}
            parts |= tabulate[name](own)
    return parts
