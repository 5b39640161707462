"""Who is sooner, at what cost, and what the decision table says: from the lines of the race."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race import cases
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS, OWN
from flwr_hetero_studies.race.outcomes import (
    ENOUGH,
    HEAD,
    LEAST,
    LESS,
    LESS_SLOW,
    against,
    as_run,
    column,
    duel,
    duel_row,
    end,
    rank,
    reach,
    row,
    smooth,
)

YARDSTICK, TUNING, PARTS = "yardstick", "tuning: ", "parts: "

# --- the parts of the page -------------------------------------------------------------------


def tuned(lines: Sequence[Line]) -> str:
    """Write what was chosen for each method on the validation split."""
    settings = settings_of(lines)
    options = Options(settings, "", fast=settings != cases.SETTINGS)
    rows = []
    for cell in dict.fromkeys([cases.MAIN, *cases.TUNED.values()]):
        for at_work in cases.TUNED_AT:
            for name, method in METHODS.items():
                found = cases.choice(cell, at_work, name, options, list(lines))
                if found is None:
                    continue
                (rate, *values), window = found
                own = [
                    f"{label} {value:g}" if isinstance(value, float) else f"{label} {value}"
                    for label, value in zip(method.named, values, strict=True)
                    if label
                ]
                count = len(cases.scores(cell, at_work, name, options, list(lines)))
                models = "newest" if window == 1 else str(window)
                rows.append([cell, at_work, name, count, rate, "; ".join(own), models])
    return tables.table(
        ["cell", "at work", "method", "trials", "rate", "own settings", "models averaged"], rows
    )


def settings_of(lines: Sequence[Line]) -> dict[str, Any]:
    return {key: lines[0]["case"][key] for key in cases.SETTINGS} if lines else cases.SETTINGS


def counted(lines: Sequence[Line]) -> str:
    """Compare what the history says of bytes and device-seconds with what the fleet has counted."""
    rows = []
    for name, own in record.by(lines, "name").items():
        ratios = [
            [x["metrics"][f"said_{key}"] / x["metrics"][key] for x in own]
            for key in ("bytes", "device_s")
        ]
        above = tables.extent([100 * value for value in record.metric(own, "above")], "{:.1f}")
        rows.append([name, *(tables.extent(each, "{:.3f}") for each in ratios), above])
    return tables.table(["method", "bytes", "device-seconds", "time above in %"], rows)


class Table(NamedTuple):
    """One cell with so many nodes at work."""

    cell: str
    at_work: int
    runs: dict[str, list[Line]]
    yard: dict[int, Line]

    @property
    def where(self) -> str:
        """Name it."""
        return f"{self.cell}, {self.at_work} at work"


def tables_of(lines: Sequence[Line]) -> list[Table]:
    """Group the race by cell and nodes at work, each with its yardsticks."""
    race = [line for line in lines if not line["case"]["experiment"].startswith(TUNING)]
    found, yards = [], {}
    for cell, own in record.by(record.of(race, name=YARDSTICK), "cell").items():
        window = next(
            line["case"]["window"] for line in race if "window" in line["case"]
            and line["case"]["cell"] == cell and line["case"]["name"] == BASE
        )  # fmt: skip
        yards[cell] = {line["seed"]: as_run(line, window) for line in own}
    for (cell, at_work), own in record.by(race, "cell", "at_work").items():
        runs = {name: x for name, x in record.by(own, "name").items() if name != YARDSTICK}
        if runs:
            found.append(Table(cell, at_work, runs, yards[cell]))
    order = list(cases.CELLS)
    return sorted(found, key=lambda table: (order.index(table.cell), table.at_work))


def section(cell: str, group: Sequence[Table]) -> str:
    """Write a cell's tables."""
    yard = group[0].yard
    ends = [line["metrics"]["limits"]["end"] for line in yard.values()]
    times = [
        reach(line, line["metrics"]["limits"]["end"] + cases.TARGETS[0]).seconds
        for line in yard.values()
    ]
    text = (
        f"### {cell}\n\nSeeds {', '.join(map(str, sorted(yard)))}. FedAvg with three nodes a round "
        f"ends at {tables.extent([100 * e for e in ends], '{:.1f}')} % and is within a point after "
        f"{tables.extent(times, '{:.0f}')} s.\n\n"
    )
    for each in group:
        rows = [row(name, own, each.yard) for name, own in ranked(each)]
        text += f"{each.at_work} nodes at work:\n\n{tables.table(HEAD, rows)}\n"
    return text


def ranked(each: Table) -> list[tuple[str, list[Line]]]:
    shift = cases.TARGETS[0]
    return sorted(each.runs.items(), key=lambda item: rank(item[1], each.yard, shift))


def decisions(found: Sequence[Table]) -> str:
    """Name the best of each table, by what one is after."""
    rows = []
    for each in found:
        names = list(each.runs)
        first, second = (
            min(names, key=lambda n, s=shift: rank(each.runs[n], each.yard, s))
            for shift in cases.TARGETS
        )
        cheap = [
            min(names, key=lambda n, k=key: cost(each.runs[n], each.yard, k))
            for key in ("bytes", "examples")
        ]
        slow = max(names, key=lambda n: mean(end(line, "slow") for line in each.runs[n]))
        above = second if gets_there(each, second, cases.TARGETS[1]) else "none gets there"
        rows.append([each.where, first, above, slow, *cheap])
    head = ["cell", "soonest: less a point", "2 points above", "slowest tier's data at the end"]
    return tables.table([*head, "fewest bytes", "least energy"], rows)


def gets_there(each: Table, name: str, shift: float) -> bool:
    ends = {seed: line["metrics"]["limits"]["end"] + shift for seed, line in each.yard.items()}
    return any(isfinite(reach(x, ends[x["seed"]]).seconds) for x in each.runs[name])


def cost(lines: Sequence[Line], yard: Mapping[int, Line], key: str) -> float:
    """Return a mean cost to the first target; infinite where a seed does not get there."""
    ends = {seed: line["metrics"]["limits"]["end"] for seed, line in yard.items()}
    return mean(getattr(reach(x, ends[x["seed"]] + cases.TARGETS[0]), key) for x in lines)


def duels(found: Sequence[Table]) -> dict[str, str]:
    """Write our best against the best rival in each table, and how many hold what is wanted."""
    head = ["cell", "best rival", "times sooner", "points more", "slowest tier's"]
    text, summary, count = "", "", ""
    for shift, title in zip(cases.TARGETS, ("a point less", "2 points above"), strict=True):
        pairs = [(each.where, duel(each.runs, each.yard, shift)) for each in found]
        known = [(where, one) for where, one in pairs if one is not None]
        body = tables.table(head, [duel_row(where, one) for where, one in known])
        text += f"To FedAvg's end, {title}:\n\n{body}\n"
        if shift == cases.TARGETS[0] and known:
            ahead = sum(one.ratio >= ENOUGH for _, one in known)
            behind = [where for where, one in known if one.ratio < LEAST]
            lost = [where for where, one in known if not one.holds]
            count = f"{ahead} of {len(known)}"
            summary = (
                f"Of {len(known)} tables ours is at least {ENOUGH} times as soon as the best rival "
                f"in {ahead}, and less than {LEAST} times in {len(behind)}"
                f"{': ' if behind else ''}{'; '.join(behind)}. It loses more than "
                f"{100 * LESS:g} points, or {100 * LESS_SLOW:g} on the slowest tier's data, in "
                f"{len(lost)}{': ' if lost else ''}{'; '.join(lost)}."
            )
    return {"duels": text, "summary": summary, "ahead": count}


def not_run(found: Sequence[Table]) -> str:
    """Name cells and methods without runs."""
    seen = {(each.cell, each.at_work): set(each.runs) for each in found}
    items = []
    for name, cell in cases.CELLS.items():
        for at_work in cell.at_work:
            there = seen.get((name, at_work))
            if there is None:
                items.append(f"- {name}, {at_work} at work: not run")
            elif missing := [method for method in METHODS if method not in there]:
                items.append(f"- {name}, {at_work} at work: not run {', '.join(missing)}")
    return "\n".join(items) or "- everything was run"


# --- the picture -----------------------------------------------------------------------------


def picture(found: Sequence[Table], path: Path) -> None:
    """Draw accuracy against time with a band over the seeds, and FedAvg's end less a point."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [each for each in found if each.cell == found[0].cell]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style | {"axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 9}):
        figure = Figure(figsize=(3.6 * len(panels), 3.5), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        drawn = [chosen_lines(each) for each in panels]
        names = dict.fromkeys([YARDSTICK, *(name for lines in drawn for name in lines)])
        look = dict(plots.looks(names))
        for each, lines, ax in zip(panels, drawn, axes, strict=True):
            for name, own in {YARDSTICK: list(each.yard.values()), **lines}.items():
                grid_s, middle, low, high = band(own)
                ax.plot(grid_s, middle, **look[name], lw=1.5)
                ax.fill_between(grid_s, low, high, color=look[name]["color"], alpha=0.12, lw=0)
            ends = [line["metrics"]["limits"]["end"] for line in each.yard.values()]
            ax.axhline(100 * (mean(ends) + cases.TARGETS[0]), color="black", lw=0.8, ls=":")
            ax.set(title=f"{each.at_work} of 20 nodes at work", xscale="log")
            ax.set_ylim(bottom=60)
            ax.set(xlabel="virtual time in seconds")
        axes[0].set(ylabel="test accuracy in %")
        handles = [axes[0].plot([], [], label=label(name), **look[name])[0] for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=100)


def label(name: str) -> str:
    return "FedAvg, 3 a round" if name == YARDSTICK else name


def chosen_lines(each: Table) -> dict[str, list[Line]]:
    """Return ours and the best rivals of a table."""
    rivals = [(n, own) for n, own in ranked(each) if n not in (*OWN, BASE)]
    mine = [(OURS, each.runs[OURS])] if OURS in each.runs else []
    return dict([*mine, *rivals[:2]])


def band(lines: Sequence[Line]) -> tuple[Vector, Vector, Vector, Vector]:
    """Return times, and of the seeds the mean and the extremes of the smoothed accuracy in %."""
    clocks = [column(line, "virtual_s") for line in lines]
    grid_s = np.geomspace(max(c[0] for c in clocks), min(c[-1] for c in clocks), 200)
    every = [np.interp(grid_s, c, smooth(x)) for c, x in zip(clocks, lines, strict=True)]
    return grid_s, *(100 * f(every, axis=0) for f in (np.mean, np.min, np.max))


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page, and draw the picture."""
    found = tables_of([x for x in lines if not x["case"]["experiment"].startswith(PARTS)])
    parts: dict[str, Any] = {"rounds": cases.ROUNDS}
    if not found:
        return parts
    race = [line for line in lines if not line["case"]["experiment"].startswith(TUNING)]
    parts |= {
        "num_tuning": len(lines) - len(race),
        "num_runs": len(race),
        "core_s": round(sum(line["metrics"]["took_s"] for line in lines)),
        "software": record.software(lines),
    }
    picture(found, folder / "race.png")
    cells = dict.fromkeys(each.cell for each in found)
    sections = [section(cell, [each for each in found if each.cell == cell]) for cell in cells]
    parts |= duels(found) | {"decisions": decisions(found)}
    parts |= {"cells": "".join(sections), "counted": counted(race), "tuned": tuned(lines)}
    if shared := [line for line in race if line["case"]["experiment"].startswith(PARTS)]:
        yard, runs = found[0].yard, record.by(shared, "name")
        parts["parts"] = tables.table(HEAD, [row(name, own, yard) for name, own in runs.items()])
        base, *others = runs
        rows = [[name, *against(runs[base], runs[name], yard)] for name in others]
        head = ["method", f"sooner than {base}, less a point", "points more", "slowest tier's"]
        parts["added"] = tables.table(head, rows)
    return parts | {"not_run": not_run(found)}
