"""Real seconds to FedAvg's accuracy, and those that the emulated fleet predicted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.criteria import interval
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.real.picture import bars
from flwr_hetero_studies.real.race import BASE, METHODS, SPEEDS, WORKLOADS
from flwr_hetero_studies.real.waiting import EMULATED, ROUNDS, WAITING

CLOSE = 0.2
"""Relative difference of a predicted speed-up from the measured one that was allowed."""
WANTED = {"heavy": 3.0, "light": 1.0}
"""Least speed-up that was wanted of FedSlice."""
HEAD = ["workload", "method", "seeds", "seconds to the target", "times as fast as FedAvg",
        "accuracy at the end", "the slowest node's classes", "MB", "replies"]  # fmt: skip
HEAD_NODES = ["workload", "message, s", "of it training, s", "first, s", "second, s"]
HEAD_WAITING = ["method", "seconds to the target", "times as fast as FedAvg", "emulated",
                "off by", "`advise`", "off by", "accuracy at the end",
                "the slowest four nodes' data", "MB to the target", "replies"]  # fmt: skip
Run = Mapping[str, Any]
"""What a run took: its seconds to the target, its curve, its end, its replies."""


def speedup(run: Run, base: Run) -> float:
    """Return how many times as fast as FedAvg the target was reached; 0: never."""
    return base["target_s"] / run["target_s"] if run["target_s"] else 0.0


def speedups(lines: Sequence[Line], base: Sequence[Line]) -> list[float]:
    pairs = record.pairs(lines, base)
    return [speedup(line["metrics"], its["metrics"]) for line, its in pairs]


def took(runs: Sequence[Run]) -> str:
    seconds = [run["target_s"] for run in runs]
    return "not reached" if None in seconds else tables.extent(seconds, "{:.0f}")


def extents(found: Sequence[float]) -> str:
    return tables.extent(found) if found and all(found) else ""


def ends(runs: Sequence[Run]) -> list[str]:
    keys = ("end", "end_slow")
    return [tables.extent([100 * run[key] for run in runs], "{:.1f}") for key in keys]


def row(lines: Sequence[Line], base: Sequence[Line]) -> list[object]:
    case = lines[0]["case"]
    runs = [line["metrics"] for line in lines]
    faster = extents(speedups(lines, base)) if case["name"] != BASE else ""
    sent = mean(line["curve"]["bytes"][-1] for line in lines) / 1e6
    replies = f"{mean(run['replies'] for run in runs):.0f}"
    cells = [case["experiment"], case["name"], len(lines), took(runs), faster]
    return [*cells, *ends(runs), f"{sent:.1f}", replies]


def verdict(workload: str, found: Sequence[float]) -> str:
    """Write what was wanted of FedSlice, and whether the interval of its speed-up decides it."""
    least = WANTED[workload]
    text = f"{workload}, warm nodes: wanted {least:g} times, "
    if not all(found):
        return text + f"not reached in {found.count(0.0)} of {len(found)} runs"
    _, low, high = np.exp(interval(np.log(found)))
    text += f"measured {mean(found):.2f}, between {low:.2f} and {high:.2f} by 95 %: "
    if low >= least:
        return text + "met"
    return text + ("missed" if high < least else "open")


def waiting_table(lines: Sequence[Line], emulated: Sequence[Line]) -> str:
    """Tabulate the race on nodes that wait, with what emulation and ``advise`` had predicted."""
    rows = []
    for name in lines[0]["metrics"]["found"] if lines else ():
        runs = [line["metrics"]["found"][name] for line in lines]
        cells = [name, took(runs), *predictions(lines, emulated, name), *ends(runs)]
        cells.append(f"{mean(map(bytes_to_target, runs)) / 1e6:.1f}")
        rows.append([*cells, f"{mean(run['replies'] for run in runs):.0f}"])
    return tables.table(HEAD_WAITING, rows)


def bytes_to_target(run: Run) -> float:
    """Return what a run had sent when it reached the target, or in all."""
    curve = run["curve"]
    reached_s = run["target_s"] or curve["seconds"][-1]
    return float(np.interp(reached_s, curve["seconds"], curve["bytes"]))


def predictions(lines: Sequence[Line], emulated: Sequence[Line], name: str) -> list[str]:
    """Write how many times as fast as FedAvg a method was, and what was predicted in two ways."""
    found = [line["metrics"]["found"] for line in lines]
    measured = [speedup(each[name], each[BASE]) for each in found]
    if name == BASE or not all(measured):
        return [""] * 5
    drawn = [drawn_speedup(line["metrics"]["target_s"], name) for line in emulated]
    advised = [line["metrics"]["advised"].get(name, {}).get("mixed") for line in lines]
    cells = [tables.extent(measured)]
    for predicted in (drawn, advised):
        cells.append(extents(predicted))
        off = geometric(predicted) / geometric(measured) - 1 if cells[-1] else 0.0
        close = f"{100 * off:+.0f} %" + ("" if abs(off) <= CLOSE else ", more than 20 %")
        cells.append(close if cells[-1] else "")
    return cells


def drawn_speedup(target_s: dict[str, list[float | None]], name: str) -> float:
    """Return the ratio to FedAvg's seconds, the geometric mean over draws; 0 if one never came."""
    both = [*zip(target_s[BASE], target_s[name], strict=True)]
    return geometric([base / own if base and own else 0.0 for base, own in both])


def geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if all(values) else 0.0


def mean_s(lines: Sequence[Line], name: str) -> float:
    """Return the mean seconds to the target, or to the end of a run that did not reach it."""
    runs = [line["metrics"]["found"][name] for line in lines]
    return mean(run["target_s"] or run["curve"]["seconds"][-1] for run in runs)


def messages(lines: Sequence[Line]) -> str:
    """Tabulate the seconds of a message on each node in FedAvg's first run."""
    rows = []
    for line in lines:
        times = line["metrics"]["nodes"].values()
        columns = [[node["message_s"], node["train_s"], *node["first_s"]] for node in times]
        cells = [", ".join(f"{s:.3g}" for s in column) for column in zip(*columns, strict=True)]
        rows.append([line["case"]["experiment"], *cells])
    return tables.table(HEAD_NODES, rows)


def waiting_parts(lines: list[Line], folder: Path) -> dict[str, Any]:
    waited = record.of(lines, experiment=WAITING)
    if not waited:
        return {}
    took_s = {name: mean_s(waited, name) for name in waited[0]["metrics"]["found"]}
    title = "Seconds to FedAvg's accuracy, 20 real nodes"
    (folder / "waiting.svg").write_text(bars(took_s, "FedSlice", title), encoding="utf-8")
    return {
        "waiting": waiting_table(waited, record.of(lines, experiment=EMULATED)),
        "waiting_seeds": len(waited),
        "message": ", ".join(f"{cost_s:.1f}" for cost_s in record.metric(waited, "message_s")),
        "rounds": ROUNDS,
    }


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    parts = waiting_parts(lines, folder)
    throttled = [line for line in lines if line["case"]["experiment"] in WORKLOADS]
    if not throttled:
        return parts
    rows = []
    verdicts = ""
    panels: dict[str, dict[str, list[Any]]] = {}
    levels: dict[str, float] = {}
    first: list[Line] = []
    for workload, runs in record.by(throttled, "experiment").items():
        by_name = record.by(runs, "name")
        group = {name: by_name[name] for name in METHODS if name in by_name}
        rows += [row(found, group[BASE]) for found in group.values()]
        if "FedSlice" in group:
            verdicts += f"- {verdict(workload, speedups(group['FedSlice'], group[BASE]))}.\n"
        title = f"{workload}, warm nodes"
        panels[title] = {name: curve(found[0]) for name, found in group.items()}
        levels[title] = 100 * group[BASE][0]["metrics"]["target"]
        first.append(group[BASE][0])
    labels = ("seconds", "test accuracy in %")
    plots.draw(panels, folder / "race.png", *labels, columns=2, levels=levels, xscale="log")
    return parts | {
        "table": tables.table(HEAD, rows),
        "messages": messages(first),
        "verdicts": verdicts,
        "shares": ", ".join(f"{WORKLOADS['light'].cpu * speed:.3g}" for speed in SPEEDS),
        "software": record.software(throttled),
    }


def curve(line: Line) -> list[Any]:
    """Return the seconds, at least 1 for a logarithmic axis, and the accuracy in %."""
    seconds = np.maximum(line["curve"]["seconds"], 1.0)
    return [seconds, [100 * value for value in line["curve"]["accuracy"]]]
