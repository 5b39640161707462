"""Time to uniform sampling's final accuracy, prices of steps, and orders."""

from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero_studies.core import curves, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.samplers.bounds import BOUNDS, DOUBLE, NORMS
from flwr_hetero_studies.samplers.cases import AGAIN, BASE, LAST, final, fixed_share, own_share

WINDOW = 3
GOALS = (0.005, 0.01, 0.02)
"""How far below uniform sampling's end the goals are, whose gains are averaged."""
READOUTS = {"accuracy": "last", "averaged": "averaged"}
HEAD = ["task", "sampler", "rate", "gain, last model", "final accuracy",
        "gain, averaged model", "final accuracy", "examples a step"]  # fmt: skip
GONE, BATCHES = "pruning", ("half batches", "double batches")
"""The sampler that this table has ended, and the other batch sizes."""
ENOUGH, LEAST, LOWER = 1.3, 0.97, 0.3
AVERAGING = ["task", "rate, last model", "rate, averaged", "final accuracy, last model",
             "final accuracy, averaged", "gain"]  # fmt: skip
SUMMARY = {AGAIN: (AGAIN,), "best other batch size, picked afterwards": BATCHES,
           "mercury": ("mercury",), GONE: (GONE,),
           **{name: (name,) for name in BOUNDS}}  # fmt: skip
SUMMARY_HEAD = ["method", "tasks", "mean gain", "extent", f"{ENOUGH} or more", f"{LEAST} or more",
                f"ends {LOWER} points lower or more"]  # fmt: skip
PRICES = {"step_ms": "{:.2f} ms", "half_step_ms": "{:.2f} ms", "forward_ms": "{:.2f} ms",
          "fixed": "{:.0%}", "bound": "{:.2f}", GONE: "{:.1%}", "mercury": "{:.1%}"}  # fmt: skip
PRICES_HEAD = ["task", "model, batch", "step", "half a batch", "forward pass", "fixed part",
               "most gained by half the examples", "pruning's own", "Mercury's own"]  # fmt: skip


def smooth(line: Line, readout: str) -> Vector:
    """Average each evaluation with the two before it."""
    return curves.smooth(line["curve"][readout], WINDOW)


def time_to(line: Line, target: float, readout: str) -> float:
    """Return when a run reached a target; at its end if it never did."""
    place = curves.reached(smooth(line, readout), target, between=True)
    times = line["curve"]["cost"]
    return curves.at(times, place) if np.isfinite(place) else float(times[-1])


def gains(own: list[Line], base: list[Line], readout: str, of_base: str = "") -> list[float]:
    """Return the base's time to a goal over the other's, mean over the goals, seed by seed.

    Goals are below the mean over the seeds of what the base has at its end: alike for both runs,
    so that two runs of one method gain 1 on average.
    """
    of_base = of_base or readout
    end = mean(float(smooth(line, of_base)[-1]) for line in base)
    goals = [end - less for less in GOALS]
    return [
        geometric_mean(time_to(its, g, of_base) / time_to(line, g, readout) for g in goals)
        for line, its in record.pairs(own, base)
    ]


def rows(lines: list[Line]) -> list[list[Any]]:
    """Write a row per task and sampler."""
    found = []
    for task, runs in record.by(lines, "task").items():
        methods = record.by(runs, "name")
        for name, own in methods.items():
            cells: list[Any] = [task, f"{name} (gone)" if name == GONE else name]
            cells.append(own[0]["case"]["rate"])
            for readout in READOUTS:
                ends = [100 * final(line, readout) for line in own]
                cells += [tables.extent(gains(own, methods[BASE], readout), "{:.2f}")]
                cells += [tables.extent(ends, "{:.1f}")]
            found.append([*cells, f"{mean(record.metric(own, 'examples_a_step')):.1f}"])
    return found


class Outcome(NamedTuple):
    """What a method gains on a task by the averaged model, mean over the seeds."""

    gain: float
    higher: float
    """Final accuracy less uniform sampling's, points."""


def outcomes(lines: list[Line]) -> dict[str, dict[str, Outcome]]:
    """Return task by task what each method gains."""
    found: dict[str, dict[str, Outcome]] = {}
    for task, runs in record.by(lines, "task").items():
        methods = record.by(runs, "name")
        ends = {n: mean(100 * final(x, "averaged") for x in own) for n, own in methods.items()}
        found[task] = {
            name: Outcome(
                geometric_mean(gains(own, methods[BASE], "averaged")), ends[name] - ends[BASE]
            )
            for name, own in methods.items()
        }
    return found


def summary(lines: list[Line]) -> dict[str, Any]:
    """Count the tasks on which a method gains enough, and loses too much; averaged models."""
    found = outcomes(lines).values()
    cells: list[list[Any]] = []
    for name, methods in SUMMARY.items():
        best = [
            max(task[m] for m in methods if m in task) for task in found if {*methods} & {*task}
        ]
        if best:
            gained = [task.gain for task in best]
            extent = f"{min(gained):.2f} to {max(gained):.2f}"
            counts = [sum(gain >= level for gain in gained) for level in (ENOUGH, LEAST)]
            counts.append(sum(task.higher <= -LOWER for task in best))
            cells.append([name, len(best), f"{geometric_mean(gained):.2f}", extent, *counts])
    sizes = [[t[name].gain for name in (BASE, *BATCHES) if name in t] for t in found]
    ahead = sum(max(own) >= t["mercury"].gain for own, t in zip(sizes, found, strict=True))
    parts: dict[str, Any] = {"summary": tables.table(SUMMARY_HEAD, cells), "ahead": ahead}
    keys = ("tasks", "mean", "extent", "enough", "least", "lower")
    by_name = {name: dict(zip(keys, row, strict=True)) for name, *row in cells}
    parts |= {"mercury": by_name["mercury"], "tasks": len(found), "enough": ENOUGH, "least": LEAST}
    parts["lower"] = LOWER
    parts |= {"double": by_name.get(DOUBLE), "norms": by_name.get(NORMS), "gone": by_name.get(GONE)}
    return {key: part for key, part in (parts | last_models(lines)).items() if part is not None}


def bounds(lines: list[Line], priced: list[Line]) -> str:
    """Write what could be gained at most, task by task."""
    halves = {line["case"]["name"]: half_bound(line) for line in priced}
    cells = []
    for task, found in outcomes(lines).items():
        if own := [found[name] for name in BOUNDS if name in found]:
            shown = (f"{one.gain:.2f} ({one.higher:+.1f})" for one in own)
            cells.append([task, f"{halves[task]:.2f}", *shown])
    return tables.table(["task", "half of the examples", *BOUNDS], cells)


def half_bound(line: Line) -> float:
    """Return the gain of steps with half of the examples, if nothing were lost by it."""
    return 2.0 / (1.0 + fixed_share(line))


def averaging(lines: list[Line]) -> dict[str, Any]:
    """Hold uniform sampling's averaged model against its last one, each at the rate it likes."""
    found, cells = [], []
    for task, runs in record.by(lines, "task").items():
        methods = record.by(runs, "name")
        own, base = methods[BASE], methods.get(LAST, methods[BASE])
        gained = gains(own, base, "averaged", "accuracy")
        found.append(geometric_mean(gained))
        ends = [
            tables.extent([100 * final(line, readout) for line in side], "{:.1f}")
            for side, readout in ((base, "accuracy"), (own, "averaged"))
        ]
        rates = [side[0]["case"]["rate"] for side in (base, own)]
        cells.append([task, *rates, *ends, tables.extent(gained, "{:.2f}")])
    counts = [sum(gain >= level for gain in found) for level in (ENOUGH, LEAST)]
    return {"mean": f"{geometric_mean(found):.1f}", "enough": counts[0], "least": counts[1],
            "tasks": len(found), "table": tables.table(AVERAGING, cells)}  # fmt: skip


def last_models(lines: list[Line]) -> dict[str, str]:
    """Return what Mercury gains by the last model, and on which tasks that ends a point lower."""
    gained, lower = [], []
    for task, runs in record.by(lines, "task").items():
        methods = record.by(runs, "name")
        gained.append(geometric_mean(gains(methods["mercury"], methods[BASE], "accuracy")))
        ends = [100 * mean(final(x, "accuracy") for x in methods[n]) for n in (BASE, "mercury")]
        if ends[0] - ends[1] >= 1.0:
            lower.append(f"{ends[0] - ends[1]:.1f} ({task})")
    return {
        "last_mean": f"{geometric_mean(gained):.2f}",
        "last_extent": f"{min(gained):.2f} to {max(gained):.2f}",
        "last_lower": "; ".join(lower) or "0",
    }


def prices(lines: list[Line]) -> str:
    """Write what steps and samplers cost."""
    found = []
    for line in lines:
        m = dict(line["metrics"])
        shares = {n: own_share(line, n) for n in (GONE, "mercury") if f"{n}_ms" in m}
        m |= {"fixed": fixed_share(line), "bound": half_bound(line), **shares}
        what = f"{line['case']['model'].rpartition('.')[2]}, {line['case']['batch-size']}"
        cells = (form.format(m[key]) if key in m else "" for key, form in PRICES.items())
        found.append([line["case"]["name"], what, *cells])
    return tables.table(PRICES_HEAD, found)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page."""
    groups = record.by(lines, "experiment")
    parts: dict[str, Any] = {"versions": record.software(lines)}
    if own := groups.get("price"):
        parts["prices"] = prices(own)
    if own := groups.get("race"):
        raced = record.by(record.of(own, name="mercury"), "task")  # others are in the table only
        parts |= summary([x for x in own if x["case"]["task"] in raced]) | {
            "race": tables.table(HEAD, rows([x for x in own if x["case"]["name"] not in BOUNDS]))
        }
        parts |= {"seeds": len(record.seeds(own)), "epochs": own[0]["case"]["epochs"]}
        if alike := record.by(groups.get("grid", []), "task"):  # rates of other tasks are not fair
            parts["averaging"] = averaging([x for x in own if x["case"]["task"] in alike])
        parts["bounds"] = bounds(own, groups.get("price", []))
    if own := groups.get("order"):
        methods = record.by(own, "name")
        base = mean(record.metric(methods["d-rr"], "excess"))
        parts["order"] = tables.table(
            ["order", "excess loss", "over random reshuffling's"],
            [
                [name, tables.extent(e, "{:.2e}"), f"{mean(e) / base:.2f}"]
                for name, runs in methods.items()
                for e in [record.metric(runs, "excess")]
            ],
        )
    return parts
