"""Real seconds to FedAvg's accuracy, and what the emulated fleet had foretold."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.real.workloads import BASE, CPU, METHODS, SPEEDS

CLOSE = 0.2
"""Difference of a foretold ratio from the measured one that was allowed."""
WANTED = {"heavy": 3.0, "light": 1.0}
"""Least ratio that was wanted of FedSlice."""
ENOUGH = 3
"""Seeds for a verdict; fewer have no interval."""
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for an interval of 95 %, by seeds."""
HEAD = ["workload", "nodes", "method", "seeds", "seconds to the target", "times as soon as FedAvg",
        "foretold", "off by", "accuracy at the end", "the slowest node's classes", "MB",
        "replies"]  # fmt: skip
HEAD_NODES = ["workload", "nodes", "message, s", "of it training, s", "first, s", "second, s"]


def ratios(lines: Sequence[Line], base: Sequence[Line]) -> list[float]:
    """Return by seed how many times as soon as FedAvg the target was reached; 0: never."""
    pairs = record.pairs(lines, base)
    both = [(own["metrics"]["target_s"], its["metrics"]["target_s"]) for own, its in pairs]
    return [theirs_s / own_s if own_s else 0.0 for own_s, theirs_s in both]


def row(own: Sequence[Line], base: Sequence[Line], foretold: Sequence[Line]) -> list[str]:
    case = own[0]["case"]
    known = [line["metrics"]["target_s"] for line in own]
    seconds = [s for s in known if s is not None]
    took = tables.extent(seconds, "{:.0f}") if len(seconds) == len(known) else "not reached"
    cells = [case["workload"], case["node"], case["name"], str(len(own)), took]
    cells += compared(own, base, foretold) if case["name"] != BASE else [""] * 3
    ends = [record.metric(own, name) for name in ("end", "end_slow")]
    cells += [tables.extent([100 * value for value in each], "{:.1f}") for each in ends]
    sent = mean(line["curve"]["bytes"][-1] for line in own)
    replies = mean(line["metrics"]["replies"] for line in own)
    return [*cells, f"{sent / 1e6:.1f}", f"{replies:.0f}"]


def compared(own: Sequence[Line], base: Sequence[Line], foretold: Sequence[Line]) -> list[str]:
    """Write the measured ratio, the foretold one, and their difference."""
    real = ratios(own, base)
    name = own[0]["case"]["name"]
    told = ratios(record.of(foretold, name=name), record.of(foretold, name=BASE))
    written = [tables.extent(each) if each and all(each) else "" for each in (real, told)]
    if not all(written):
        return [*written, ""]
    seeds = record.seeds(foretold)
    same = ratios([line for line in own if line["seed"] in seeds], base)
    off = mean(told) / mean(same) - 1
    return [*written, f"{100 * off:+.0f} %" + ("" if abs(off) <= CLOSE else ", more than 20 %")]


def verdict(group: dict[str, list[Line]]) -> str:
    """Say of FedSlice what was wanted, and whether an interval holds it."""
    own, base = group["FedSlice"], group[BASE]
    case, found = own[0]["case"], ratios(own, base)
    least = WANTED[case["workload"]]
    text = f"{case['workload']}, {case['node']} nodes: wanted {least:g} times, "
    if not all(found):
        return text + f"not reached in {found.count(0.0)} of {len(found)} runs"
    if len(found) < ENOUGH:
        return text + f"measured {tables.extent(found)} with {len(found)} of {ENOUGH} seeds: open"
    low, high = interval(found)
    said = "met" if low >= least else "missed" if high < least else "open"
    return text + f"measured {mean(found):.2f}, between {low:.2f} and {high:.2f} by 95 %: {said}"


def interval(found: Sequence[float]) -> tuple[float, float]:
    """Return an interval of 95 % for the mean ratio, by the logarithms."""
    logs = np.log(found)
    half = STUDENT[len(found)] * logs.std(ddof=1) / len(found) ** 0.5
    low, high = np.exp([logs.mean() - half, logs.mean() + half])
    return float(low), float(high)


def messages(lines: Sequence[Line]) -> str:
    """Tabulate what a message took on each node in FedAvg's first run."""
    rows = []
    for line in lines:
        times = line["metrics"]["nodes"].values()
        columns = [[node["message_s"], node["train_s"], *node["first_s"]] for node in times]
        cells = [", ".join(f"{s:.3g}" for s in each) for each in zip(*columns, strict=True)]
        rows.append([line["case"]["workload"], line["case"]["node"], *cells])
    return tables.table(HEAD_NODES, rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    real, foretold = (record.of(lines, foretold=told) for told in (False, True))
    if not real:
        return {}
    rows, verdicts, panels, first = [], [], {}, []
    levels = {}
    for (workload, node), own in record.by(real, "workload", "node").items():
        by_name = record.by(own, "name")
        # in the order of the methods, whatever was run first
        group = {name: by_name[name] for name in METHODS if name in by_name}
        told = record.of(foretold, workload=workload, node=node)
        rows += [row(each, group[BASE], told) for each in group.values()]
        verdicts += [verdict(group)] if "FedSlice" in group else []
        title = f"{workload}, {node} nodes"
        panels[title] = {name: curve(each[0]) for name, each in group.items()}
        levels[title] = 100 * group[BASE][0]["metrics"]["target"]
        first += [line for line in group[BASE] if line["metrics"]["nodes"]][:1]
    labels = ("seconds", "test accuracy in %")
    plots.draw(panels, folder / "race.png", *labels, columns=2, levels=levels, xscale="log")
    loads = record.metric(real, "load")
    parts = {"table": tables.table(HEAD, rows), "messages": messages(first)}
    parts |= {"verdicts": "".join(f"- {each}.\n" for each in verdicts)}
    parts |= {"shares": ", ".join(f"{CPU * speed:.3g}" for speed in SPEEDS)}
    return parts | {"software": record.software(real), "low": min(loads), "high": max(loads)}


def curve(line: Line) -> list[Any]:
    """Return the seconds and the accuracy in %; a logarithmic axis has no zero."""
    seconds, accuracy = line["curve"]["seconds"], line["curve"]["accuracy"]
    return [np.maximum(seconds, 1.0), [100 * value for value in accuracy]]
