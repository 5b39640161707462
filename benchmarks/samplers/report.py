"""Time to uniform sampling's final accuracy, prices of steps, and orders."""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.samplers.cases import final, fixed_share, own_share
from benchmarks.tables import Line, Vector

BASE, WINDOW = "uniform", 3
READOUTS = {"accuracy": "last", "averaged": "averaged"}
HEAD = ["task", "sampler", "rate", "gain, last model", "final accuracy",
        "gain, averaged model", "final accuracy", "examples a step"]  # fmt: skip
GONE, BATCHES = "pruning", ("half batches", "double batches")
"""The sampler that this table has ended, and the other batch sizes."""
ENOUGH, LEAST = 1.3, 0.97
PRICES = {"step_ms": "{:.2f} ms", "half_step_ms": "{:.2f} ms", "forward_ms": "{:.2f} ms",
          "fixed": "{:.0%}", "bound": "{:.2f}", GONE: "{:.1%}", "mercury": "{:.1%}"}  # fmt: skip
PRICES_HEAD = ["task", "model, batch", "step", "half a batch", "forward pass", "fixed part",
               "most gained by half the examples", "pruning's own", "Mercury's own"]  # fmt: skip


def smooth(line: Line, readout: str) -> Vector:
    """Average each evaluation with the two before it."""
    return tables.smooth(line["curve"][readout], WINDOW)


def time_to(line: Line, target: float, readout: str, clock: str) -> float:
    """Return when a run reached a target; at its end if it never did."""
    place = tables.reached(smooth(line, readout), target, between=True)
    times = line["curve"][clock]
    return tables.at(times, place) if np.isfinite(place) else float(times[-1])


def gains(own: list[Line], base: list[Line], readout: str, clock: str = "cost") -> list[float]:
    """Return uniform's time to its own final accuracy over the other's, seed by seed."""
    found = []
    for line, its in tables.pairs(own, base):
        target = float(smooth(its, readout)[-1])
        found.append(time_to(its, target, readout, clock) / time_to(line, target, readout, clock))
    return found


def rows(lines: list[Line]) -> list[list[Any]]:
    """Write a row per task and sampler."""
    found = []
    for task, runs in tables.by(lines, "task").items():
        methods = tables.by(runs, "name")
        for name, own in methods.items():
            cells: list[Any] = [task, f"{name} (gone)" if name == GONE else name]
            cells.append(own[0]["case"]["rate"])
            for readout in READOUTS:
                ends = [100 * final(line, readout) for line in own]
                cells += [tables.extent(gains(own, methods[BASE], readout), "{:.2f}")]
                cells += [tables.extent(ends, "{:.1f}")]
            found.append([*cells, f"{mean(tables.metric(own, 'examples_a_step')):.1f}"])
    return found


def summary(lines: list[Line]) -> dict[str, Any]:
    """Count the tasks on which a sampler, or another batch size, gains enough; averaged models."""
    found: list[dict[str, float]] = []
    for runs in tables.by(lines, "task").values():
        methods = tables.by(runs, "name")
        found.append({n: geometric_mean(gains(own, methods[BASE], "averaged"))
                      for n, own in methods.items()})  # fmt: skip

    def count(names: Sequence[str], least: float) -> int:
        return sum(max(task.get(name, 0.0) for name in names) >= least for task in found)

    ahead = sum(max(t[n] for n in (BASE, *BATCHES)) >= max(t[GONE], t["mercury"]) for t in found)
    return {
        "tasks": len(found),
        "pruning_enough": count([GONE], ENOUGH),
        "pruning_least": count([GONE], LEAST),
        "pruning_below": len(found) - count([GONE], LEAST),
        "mercury_enough": count(["mercury"], ENOUGH),
        "mercury_least": count(["mercury"], LEAST),
        "batch_enough": count(BATCHES, ENOUGH),
        "ahead": ahead,
        "enough": ENOUGH,
        "least": LEAST,
    }


def prices(lines: list[Line]) -> str:
    """Write what steps and samplers cost."""
    found = []
    for line in lines:
        fixed = fixed_share(line)
        m = line["metrics"] | {"fixed": fixed, "bound": 2 / (1 + fixed)}
        m |= {name: own_share(line, name) for name in (GONE, "mercury")}
        what = f"{line['case']['model']}, {line['case']['batch-size']}"
        found.append([line["case"]["name"], what, *(f.format(m[k]) for k, f in PRICES.items())])
    return tables.table(PRICES_HEAD, found)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page."""
    groups = tables.by(lines, "experiment")
    parts: dict[str, Any] = {"versions": tables.software(lines)}
    if own := groups.get("price"):
        parts["prices"] = prices(own)
    if own := groups.get("race"):
        parts |= summary(own) | {"race": tables.table(HEAD, rows(own))}
        parts |= {"seeds": len(tables.seeds(own)), "epochs": own[0]["case"]["epochs"]}
    if own := groups.get("order"):
        methods = tables.by(own, "name")
        base = mean(tables.metric(methods["d-rr"], "excess"))
        parts["order"] = tables.table(
            ["order", "excess loss", "over random reshuffling's"],
            [
                [name, tables.extent(e, "{:.2e}"), f"{mean(e) / base:.2f}"]
                for name, runs in methods.items()
                for e in [tables.metric(runs, "excess")]
            ],
        )
    return parts
