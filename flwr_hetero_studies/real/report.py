"""Real seconds to FedAvg's accuracy, and those that the emulated fleet predicted."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.real.picture import bars
from flwr_hetero_studies.real.waiting import EMULATED, ROUNDS, WAITING
from flwr_hetero_studies.real.workloads import BASE, METHODS, SPEEDS, WORKLOADS

CLOSE = 0.2
"""Relative difference of a predicted speed-up from the measured one that was allowed."""
WANTED = {"heavy": 3.0, "light": 1.0}
"""Least speed-up that was wanted of FedSlice."""
ENOUGH = 3
"""Seeds that are needed for a verdict."""
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for an interval of 95 %, by seeds."""
HEAD = ["workload", "nodes", "method", "seeds", "seconds to the target", "times as fast as FedAvg",
        "predicted", "off by", "accuracy at the end", "the slowest node's classes", "MB",
        "replies"]  # fmt: skip
ENDS = ("end", "end_slow")
HEAD_NODES = ["workload", "nodes", "message, s", "of it training, s", "first, s", "second, s"]


def ratios(lines: Sequence[Line], base: Sequence[Line]) -> list[float]:
    """Return by seed how many times as fast as FedAvg the target was reached; 0: never."""
    speedups = []
    for line, base_line in record.pairs(lines, base):
        took_s = line["metrics"]["target_s"]
        speedups.append(base_line["metrics"]["target_s"] / took_s if took_s else 0.0)
    return speedups


def row(lines: Sequence[Line], base: Sequence[Line], foretold: Sequence[Line]) -> list[str]:
    case = lines[0]["case"]
    seconds = record.metric(lines, "target_s")
    took = "not reached" if None in seconds else tables.extent(seconds, "{:.0f}")
    cells = [case["workload"], case["node"], case["name"], str(len(lines)), took]
    cells += compared(lines, base, foretold) if case["name"] != BASE else [""] * 3
    for name in ENDS:
        values = [100 * value for value in record.metric(lines, name)]
        cells.append(tables.extent(values, "{:.1f}"))
    sent = mean(line["curve"]["bytes"][-1] for line in lines)
    return [*cells, f"{sent / 1e6:.1f}", f"{mean(record.metric(lines, 'replies')):.0f}"]


def compared(lines: Sequence[Line], base: Sequence[Line], foretold: Sequence[Line]) -> list[str]:
    """Write the measured speed-up, the predicted one, and their difference."""
    measured = ratios(lines, base)
    name = lines[0]["case"]["name"]
    predicted = ratios(record.of(foretold, name=name), record.of(foretold, name=BASE))
    cells = [
        tables.extent(found) if found and all(found) else "" for found in (measured, predicted)
    ]
    if not all(cells):
        return [*cells, ""]
    seeds = record.seeds(foretold)
    same = ratios([line for line in lines if line["seed"] in seeds], base)
    off = mean(predicted) / mean(same) - 1
    return [*cells, f"{100 * off:+.0f} %" + ("" if abs(off) <= CLOSE else ", more than 20 %")]


def verdict(group: dict[str, list[Line]]) -> str:
    """Write what was wanted of FedSlice, and whether the interval of its speed-up decides it."""
    case = group["FedSlice"][0]["case"]
    found = ratios(group["FedSlice"], group[BASE])
    least = WANTED[case["workload"]]
    text = f"{case['workload']}, {case['node']} nodes: wanted {least:g} times, "
    if not all(found):
        return text + f"not reached in {found.count(0.0)} of {len(found)} runs"
    if len(found) < ENOUGH:
        return text + f"measured {tables.extent(found)} with {len(found)} of {ENOUGH} seeds: open"
    low, high = interval(found)
    text += f"measured {mean(found):.2f}, between {low:.2f} and {high:.2f} by 95 %: "
    if low >= least:
        return text + "met"
    return text + ("missed" if high < least else "open")


def interval(found: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean."""
    logs = np.log(found)
    half = STUDENT[len(found)] * logs.std(ddof=1) / len(found) ** 0.5
    low, high = np.exp([logs.mean() - half, logs.mean() + half])
    return float(low), float(high)


HEAD_WAITING = ["method", "seconds to the target", "times as fast as FedAvg", "emulated",
                "off by", "`advise`", "off by", "accuracy at the end",
                "the slowest four nodes' data", "MB to the target", "replies"]  # fmt: skip


def waiting_table(lines: Sequence[Line], emulated: Sequence[Line]) -> str:
    """Tabulate the race on nodes that wait, with what emulation and ``advise`` had predicted."""
    rows = []
    for name in lines[0]["metrics"]["found"] if lines else ():
        runs = [line["metrics"]["found"][name] for line in lines]
        took = [run["target_s"] for run in runs]
        cells = [name, "not reached" if None in took else tables.extent(took, "{:.0f}")]
        cells += [""] * 5 if name == BASE else predictions(lines, emulated, name)
        cells += [tables.extent([100 * run[key] for run in runs], "{:.1f}") for key in ENDS]
        cells.append(f"{mean(map(bytes_to_target, runs)) / 1e6:.1f}")
        rows.append([*cells, f"{mean(run['replies'] for run in runs):.0f}"])
    return tables.table(HEAD_WAITING, rows)


def bytes_to_target(run: dict[str, Any]) -> float:
    """Return what a run had sent when it reached the target, or in all."""
    curve = run["curve"]
    reached_s = run["target_s"] or curve["seconds"][-1]
    return float(np.interp(reached_s, curve["seconds"], curve["bytes"]))


def predictions(lines: Sequence[Line], emulated: Sequence[Line], name: str) -> list[str]:
    """Write how many times as fast as FedAvg a method was, and what was predicted in two ways."""
    measured = [speedup(line["metrics"]["found"], name) for line in lines]
    if not all(measured):
        return [""] * 5
    drawn = [drawn_speedup(line["metrics"]["target_s"], name) for line in emulated]
    advised = [line["metrics"]["advised"].get(name, {}).get("mixed") for line in lines]
    cells = [tables.extent(measured)]
    for predicted in (drawn, advised):
        if not predicted or not all(predicted):
            cells += ["", ""]
            continue
        off = geometric(predicted) / geometric(measured) - 1
        close = f"{100 * off:+.0f} %" + ("" if abs(off) <= CLOSE else ", more than 20 %")
        cells += [tables.extent(predicted), close]
    return cells


def drawn_speedup(target_s: dict[str, list[float | None]], name: str) -> float:
    """Return the ratio to FedAvg's seconds, the geometric mean over draws; 0 if one never came."""
    took_s = target_s[name]
    base_s = target_s[BASE]
    if None in took_s or None in base_s:
        return 0.0
    return geometric([base / own for base, own in zip(base_s, took_s, strict=True)])  # type: ignore[operator]


def mean_s(lines: Sequence[Line], name: str) -> float:
    """Return the mean seconds to the target, or to the end of a run that did not reach it."""
    runs = [line["metrics"]["found"][name] for line in lines]
    return mean(run["target_s"] or run["curve"]["seconds"][-1] for run in runs)


def speedup(found: dict[str, Any], name: str) -> float:
    """Return how many times as fast as FedAvg the target was reached; 0: never."""
    took_s = found[name]["target_s"]
    return found[BASE]["target_s"] / took_s if took_s else 0.0


def geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def messages(lines: Sequence[Line]) -> str:
    """Tabulate the seconds of a message on each node in FedAvg's first run."""
    rows = []
    for line in lines:
        times = line["metrics"]["nodes"].values()
        columns = [[node["message_s"], node["train_s"], *node["first_s"]] for node in times]
        cells = [", ".join(f"{s:.3g}" for s in column) for column in zip(*columns, strict=True)]
        rows.append([line["case"]["workload"], line["case"]["node"], *cells])
    return tables.table(HEAD_NODES, rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    waited = record.of(lines, experiment=WAITING)
    emulated = record.of(lines, experiment=EMULATED)
    real = record.of(lines, foretold=False)
    foretold = record.of(lines, foretold=True)
    if not real:
        return {}
    rows: list[list[str]] = []
    verdicts: list[str] = []
    panels: dict[str, dict[str, list[Any]]] = {}
    levels: dict[str, float] = {}
    first: list[Line] = []
    for (workload, node), runs in record.by(real, "workload", "node").items():
        by_name = record.by(runs, "name")
        group = {name: by_name[name] for name in METHODS if name in by_name}
        predicted = record.of(foretold, workload=workload, node=node)
        rows += [row(found, group[BASE], predicted) for found in group.values()]
        if "FedSlice" in group:
            verdicts.append(verdict(group))
        title = f"{workload}, {node} nodes"
        panels[title] = {name: curve(found[0]) for name, found in group.items()}
        levels[title] = 100 * group[BASE][0]["metrics"]["target"]
        first += [line for line in group[BASE] if line["metrics"]["nodes"]][:1]
    labels = ("seconds", "test accuracy in %")
    plots.draw(panels, folder / "race.png", *labels, columns=2, levels=levels, xscale="log")
    loads = record.metric(real, "load")
    parts = {"table": tables.table(HEAD, rows), "messages": messages(first)}
    if waited:
        took_s = {name: mean_s(waited, name) for name in waited[0]["metrics"]["found"]}
        title = "Seconds to FedAvg's accuracy, 20 real nodes"
        (folder / "waiting.svg").write_text(bars(took_s, "FedSlice", title), encoding="utf-8")
    costs_s = [f"{cost_s:.1f}" for cost_s in record.metric(waited, "message_s")]
    parts |= {"waiting": waiting_table(waited, emulated), "waiting_seeds": len(waited)}
    parts |= {"message": ", ".join(costs_s), "rounds": ROUNDS}
    parts |= {"verdicts": "".join(f"- {each}.\n" for each in verdicts)}
    parts |= {"shares": ", ".join(f"{WORKLOADS['light'].cpu * speed:.3g}" for speed in SPEEDS)}
    return parts | {"software": record.software(real), "low": min(loads), "high": max(loads)}


def curve(line: Line) -> list[Any]:
    """Return the seconds, at least 1 for a logarithmic axis, and the accuracy in %."""
    seconds = np.maximum(line["curve"]["seconds"], 1.0)
    return [seconds, [100 * value for value in line["curve"]["accuracy"]]]
