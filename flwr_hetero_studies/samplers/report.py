"""Time to uniform sampling's final accuracy, prices of steps, and what could be gained."""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from flwr_hetero_studies.core import curves, record, tables
from flwr_hetero_studies.core.record import Line, by
from flwr_hetero_studies.samplers.cases import AGAIN, BASE, LAST, final, fixed_share, own_share

GOALS = (0.005, 0.01, 0.02)
"""How far below uniform sampling's end the goals are, whose gains are averaged."""
READOUTS = ("accuracy", "averaged")
MERCURY, BATCHES = "mercury", ("half batches", "double batches")
ENOUGH, LEAST, LOWER = 1.3, 0.97, 0.3
SHOWN = (*BATCHES, MERCURY, AGAIN)
HEAD = ["task", "uniform's accuracy", *SHOWN]
AVERAGING = ["task", "rate, last model", "rate, averaged", "accuracy, last model",
             "accuracy, averaged", "gain"]  # fmt: skip
SUMMARY = {AGAIN: (AGAIN,), "best other batch size, picked afterwards": BATCHES,
           MERCURY: (MERCURY,)}  # fmt: skip
SUMMARY_HEAD = ["method", "tasks", "mean gain", "extent", f"{ENOUGH} or more", f"{LEAST} or more",
                f"ends {LOWER} points lower or more"]  # fmt: skip
PRICES = {"step_ms": "{:.2f}", "fixed": "{:.0%}", "bound": "{:.2f}", MERCURY: "{:.1%}"}
PRICES_HEAD = ["task", "model, batch", "step, ms", "fixed part", "half the examples, at most",
               "Mercury's own"]  # fmt: skip


def smooth(line: Line, readout: str) -> curves.Vector:
    return curves.smooth(line["curve"][readout], 3)


def time_to(line: Line, target: float, readout: str) -> float:
    """Return when a run reached a target; at its end if it never did."""
    clock = line["curve"]["cost"]
    return curves.time_to(clock, smooth(line, readout), target, never=float(clock[-1]))


def gains(own: list[Line], base: list[Line], readout: str, of_base: str = "") -> list[float]:
    """Return the base's time to a goal over the other's, mean over the goals, seed by seed."""
    of_base = of_base or readout
    # alike for all seeds, so that two runs of one method gain 1 on average
    end = mean(float(smooth(line, of_base)[-1]) for line in base)
    goals = [end - less for less in GOALS]
    return [
        geometric_mean(time_to(its, g, of_base) / time_to(line, g, readout) for g in goals)
        for line, its in record.pairs(own, base)
    ]


def ends(own: list[Line], readout: str) -> list[float]:
    return [100 * final(line, readout) for line in own]


def methods_by_task(lines: list[Line]) -> dict[str, dict[str, list[Line]]]:
    return {task: by(runs, "name") for task, runs in by(lines, "task").items()}


def count(found: Sequence[float], level: float) -> int:
    return sum(gain >= level for gain in found)


def race_table(lines: list[Line], readout: str) -> str:
    """Tabulate gains over uniform sampling, and accuracy at the end less uniform sampling's."""
    rows = []
    for task, methods in methods_by_task(lines).items():
        base = methods[BASE]
        cells = [cell(methods[n], base, readout) if n in methods else "" for n in SHOWN]
        rows.append([task, f"{mean(ends(base, readout)):.1f}", *cells])
    return tables.table(HEAD, rows)


def against(own: list[Line], base: list[Line], readout: str) -> tuple[list[float], float]:
    """Return the gains, and accuracy at the end less the base's in points."""
    more = mean(ends(own, readout)) - mean(ends(base, readout))
    return gains(own, base, readout), more


def cell(own: list[Line], base: list[Line], readout: str) -> str:
    gained, more = against(own, base, readout)
    return f"{tables.extent(gained)}, {more:+.1f}"


def gained_by(own: list[Line], base: list[Line], readout: str) -> tuple[float, float]:
    gained, more = against(own, base, readout)
    return geometric_mean(gained), more


def summary(lines: list[Line]) -> dict[str, Any]:
    tasks = methods_by_task(lines).values()
    found = [{n: gained_by(own, t[BASE], "averaged") for n, own in t.items()} for t in tasks]
    cells: list[list[Any]] = []
    for name, methods in SUMMARY.items():
        best = [max(t[m] for m in methods if m in t) for t in found if {*methods} & {*t}]
        if best:
            gained = [gain for gain, _ in best]
            extent = f"{min(gained):.2f} to {max(gained):.2f}"
            counts = [count(gained, level) for level in (ENOUGH, LEAST)]
            counts.append(sum(higher <= -LOWER for _, higher in best))
            cells.append([name, len(best), f"{geometric_mean(gained):.2f}", extent, *counts])
    sizes = [max(t[name] for name in (BASE, *BATCHES) if name in t) for t in found]
    ahead = sum(own[0] >= t[MERCURY][0] for own, t in zip(sizes, found, strict=True))
    # the row of Mercury is the last
    parts: dict[str, Any] = {"mercury": {"mean": cells[-1][2], "extent": cells[-1][3]}}
    parts |= {"enough": ENOUGH, "least": LEAST, "lower": LOWER, "ahead": ahead, "tasks": len(found)}
    return parts | {"summary": tables.table(SUMMARY_HEAD, cells), **last_models(lines)}


def averaging(lines: list[Line]) -> dict[str, Any]:
    """Hold uniform sampling's averaged model against its last one, each at the rate it likes."""
    found, cells = [], []
    for task, methods in methods_by_task(lines).items():
        own, base = methods[BASE], methods.get(LAST, methods[BASE])
        gained = gains(own, base, "averaged", "accuracy")
        found.append(geometric_mean(gained))
        rates = [side[0]["case"]["rate"] for side in (base, own)]
        accuracies = ends(base, "accuracy"), ends(own, "averaged")
        right = [f"{mean(each):.1f}" for each in accuracies]
        cells.append([task, *rates, *right, tables.extent(gained)])
    parts = {"enough": count(found, ENOUGH), "least": count(found, LEAST), "tasks": len(found)}
    made = {"table": tables.table(AVERAGING, cells), "mean": f"{geometric_mean(found):.1f}"}
    return parts | made


def last_models(lines: list[Line]) -> dict[str, str]:
    """Return what Mercury gains by the last model, and on which tasks that ends a point lower."""
    tasks = methods_by_task(lines).items()
    found = {task: gained_by(own[MERCURY], own[BASE], "accuracy") for task, own in tasks}
    gained = [gain for gain, _ in found.values()]
    lower = [f"{-more:.1f} ({task})" for task, (_, more) in found.items() if more <= -1.0]
    mean_gain, extent = f"{geometric_mean(gained):.2f}", f"{min(gained):.2f} to {max(gained):.2f}"
    return {"last_extent": extent, "last_lower": ", ".join(lower) or "0", "last_mean": mean_gain}


def prices(lines: list[Line]) -> str:
    found = []
    for line in lines:
        m = line["metrics"] | {"fixed": fixed_share(line), MERCURY: own_share(line, MERCURY)}
        # if nothing were lost by half of the examples
        m["bound"] = 2.0 / (1.0 + m["fixed"])
        what = f"{line['case']['model'].rpartition('.')[2]}, {line['case']['batch-size']}"
        cells = (form.format(m[key]) for key, form in PRICES.items())
        found.append([line["case"]["name"], what, *cells])
    return tables.table(PRICES_HEAD, found)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = by(lines, "experiment")
    parts: dict[str, Any] = {"versions": record.software(lines)}
    if own := groups.get("price"):
        parts["prices"] = prices(own)
    if own := groups.get("race"):
        # others are in the table only
        raced = by(record.of(own, name=MERCURY), "task")
        parts |= summary([x for x in own if x["case"]["task"] in raced])
        parts |= {readout: race_table(own, readout) for readout in READOUTS}
        # rates of other tasks are not fair
        alike = by(groups.get("grid", []), "task")
        if alike:
            parts["averaging"] = averaging([x for x in own if x["case"]["task"] in alike])
    return parts
