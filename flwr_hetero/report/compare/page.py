"""The page of a comparison: one file that needs no network, drawn by plotly's script inside."""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from flwr_hetero.report.compare.groups import Comparison, Group, Run, setting
from flwr_hetero.report.compare.verdict import cost_text, times
from flwr_hetero.report.history import CLOCKS, FAIRNESS, METRICS, TIFL, as_dict, replace
from flwr_hetero.report.nodes import (
    device_seconds,
    failure_groups,
    last_fairness,
    node_stats,
    num_tiers,
)
from flwr_hetero.report.style import (
    RUN_STYLES,
    duration,
    figure,
    heading,
    is_share,
    size,
    time_unit,
    words,
)

MAX_ROWS = 1000
"""Longest table on the page; ``--json`` and the histories have the rest."""
MAX_METRICS = 6
GRID = 100
"""Points of a mean over seeds."""
DASHES = dict(zip(RUN_STYLES, ("solid", "dash", "dashdot", "dot"), strict=True))

Cell = tuple[str, float | None]
"""A text, and the number to sort by."""


class Table(NamedTuple):
    """A table that readers can sort and filter."""

    title: str
    head: tuple[str, ...]
    rows: list[list[Cell]]
    caption: str = ""


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page, in one step; return its absolute path."""
    out = Path(path).expanduser().absolute()
    environment = Environment(loader=PackageLoader("flwr_hetero.report", ""), autoescape=True)
    source = environment.loader.get_source  # type: ignore[union-attr]
    scripts = [get_plotlyjs().replace("\r\n", "\n"), source(environment, "compare/page.js")[0]]
    page = environment.get_template("compare/page.html").render(
        title=_title(comparison),
        css=source(environment, "page.css")[0],
        scripts=scripts,
        hashes=[b64encode(sha256(text.encode()).digest()).decode() for text in scripts],
        sentences=comparison.sentences or (_alone(comparison),),
        groups=comparison.groups,
        settings=_settings(comparison),
        tables=[table for table in _tables(comparison) if table.rows],
        data=chart_data(comparison),
        max_rows=MAX_ROWS,
    )
    replace(out, page.encode())
    return out


def _title(comparison: Comparison) -> str:
    base, *others = (group.label for group in comparison.groups)
    kinds = others if len(others) < 2 else [f"{len(others)} kinds of runs"]
    return " against ".join([*kinds, base])


def _alone(comparison: Comparison) -> str:
    [group] = comparison.groups
    end = figure(comparison.judge.metric, float(np.mean([run.end for run in group.results])))
    count = len(group.runs)
    runs = "one run" if count == 1 else f"{count} runs of equal settings"
    return f"Nothing to compare: {runs}, {words(comparison.judge.metric)} {end} at the end."


def _settings(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the settings that differ, with a value per group."""
    firsts = [group.runs[0] for group in comparison.groups]
    return [(key, [setting(run, key) for run in firsts]) for key in comparison.differing]


# -- curves --


def chart_data(comparison: Comparison) -> dict[str, Any]:
    """Return what the script draws: axes, metrics, and each group's curves."""
    judge, groups = comparison.judge, comparison.groups
    histories = [run.history for group in groups for run in group.runs]
    axes = _axes(comparison)
    shared = groups[0].runs[0].history.metrics(METRICS)[:MAX_METRICS]
    names = [judge.metric, *shared, f"{FAIRNESS}/mean", f"{FAIRNESS}/worst-tenth"]
    everywhere = {name for name in names if all(name in h.metrics() for h in histories)}
    metrics = [name for name in dict.fromkeys(names) if name in everywhere or name == judge.metric]
    fair = next((h for h in map(last_fairness, histories) if h), None)
    return {
        "axes": [{"key": key, "label": f"{label} ({unit})"} for key, label, _, unit in axes],
        "metrics": [
            {
                "key": name,
                "label": heading(name),
                "percent": is_share(fair.metric if fair and name.startswith(FAIRNESS) else name),
                "target": judge.target if name == judge.metric else None,
            }
            for name in metrics
        ],
        "groups": [
            {
                "label": escape(group.label),
                "colour": group.colour,
                "dash": list(DASHES.values())[number // 7 % len(DASHES)],
                "cost": [result.cost for result in group.results if result.cost is not None],
                "curves": {
                    name: {key: _curve(group, name, key, scale) for key, _, scale, _ in axes}
                    for name in metrics
                },
            }
            for number, group in enumerate(groups)
        ],
        "clock": {"label": CLOCKS[judge.clock], "round": judge.clock == "round"},
    }


def _axes(comparison: Comparison) -> list[tuple[str, str, float, str]]:
    """Return key, name, unit's size and unit of each axis that all runs have."""
    runs = [run for group in comparison.groups for run in group.runs]
    found = []
    names = CLOCKS | {"bytes": "bytes sent and received", "device_s": "device-seconds"}
    units = {run.history.unit for run in runs}
    for key, label in names.items():
        ends = [float(np.nanmax(_column(run, key), initial=0.0)) for run in runs]
        if not all(ends) or (key == "round" and len(units) > 1):
            continue
        longest = max(ends)
        if key == "bytes":
            symbol = size(longest).split()[1]
            factor = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}.get(symbol, 1.0)
            found.append((key, label, factor, symbol))
        elif key == "round":
            found.append((key, label, 1.0, f"{units.pop()}s"))
        else:
            found.append((key, label, *time_unit(longest)))
    chosen = comparison.judge.clock
    return sorted(found, key=lambda axis: axis[0] != chosen)


def _column(run: Run, key: str) -> NDArray[np.float64]:
    """Return an axis of a run; traffic and device-seconds added up."""
    history = run.history
    if key == "bytes":
        both = np.array([history.column("bytes_up"), history.column("bytes_down")])
        return np.nancumsum(np.nansum(both, axis=0))
    if key == "device_s":
        busy = history.column("device_s")
        if np.isnan(busy).all():
            latency = [as_dict(record.get("latency")).values() for record in history.rounds]
            busy = np.array([sum(s for s in row if isinstance(s, int | float)) for row in latency])
        return np.nancumsum(busy)
    return history.column(key)


def _curve(group: Group, name: str, key: str, scale: float) -> dict[str, Any]:
    """Return a run's points, or mean and range over seeds on a common grid."""
    lines = []
    for run in group.runs:
        x, y = _column(run, key) / scale, run.history.metric(name)
        known = ~np.isnan(x) & ~np.isnan(y)
        lines.append((x[known], y[known]))
    if len(lines) == 1:
        [(x, y)] = lines
        return {"x": _rounded(x), "y": _rounded(y)}
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.linspace(first, last, GRID) if last > first else np.array([first])
    values = np.array([np.interp(grid, x, y) for x, y in lines])
    bands = {"y": values.mean(axis=0), "low": values.min(axis=0), "high": values.max(axis=0)}
    return {"x": _rounded(grid), **{name: _rounded(band) for name, band in bands.items()}}


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


# -- tables --


def _tables(comparison: Comparison) -> Iterable[Table]:
    yield _runs(comparison)
    every = [(group.label, run) for group in comparison.groups for run in group.runs]
    yield _tiers(every)
    yield _nodes(every)
    yield _fairness(every)
    yield _failures(every)


def _named(label: str, run: Run) -> list[Cell]:
    return [(label, None), ("" if run.seed is None else str(run.seed), run.seed)]


def _number(value: float, text: str) -> Cell:
    return (text, float(value)) if np.isfinite(value) else ("", None)


def _runs(comparison: Comparison) -> Table:
    judge, base = comparison.judge, comparison.groups[0]
    rows = []
    for group in comparison.groups:
        for run, result in zip(group.runs, group.results, strict=True):
            history, factor = run.history, group.speed.factor if group.speed else np.nan
            busy = device_seconds(history)
            traffic = float(_column(run, "bytes")[-1])
            cost = np.inf if result.cost is None else result.cost
            row = [
                (cost_text(judge.clock, result.cost, history.unit), float(min(cost, 1e300))),
                _number(factor, times(factor)) if group is not base else ("baseline", 1.0),
                _number(result.end, figure(judge.metric, result.end)),
                (str(history.last_round), float(history.last_round)),
                _number(result.total, cost_text(judge.clock, result.total, history.unit)),
                _number(traffic or np.nan, size(traffic)),
                _number(busy or np.nan, duration(busy)),
                (run.path.name, None),
            ]
            rows.append([*_named(group.label, run), *row])
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    head = (f"time to {goal}", "speed-up", "end", "rounds", "in all", "traffic", "device time")
    caption = (
        f"Target: {goal} ({judge.target:.6g}), by a running median of five evaluations. End: "
        "median of the last five. Speed-up: of all seeds together."
    )
    return Table("Runs", ("run", "seed", *head, "folder"), rows, caption)


def _tiers(every: Sequence[tuple[str, Run]]) -> Table:
    rows = []
    for label, run in every:
        history, nodes = run.history, node_stats(run.history)
        drawn = history.column(TIFL, "tier")
        seconds = np.diff(history.clock[1], prepend=np.nan)
        for tier in range(num_tiers(history)):
            latency = [n.typical_s for n in nodes if n.tier == tier and np.isfinite(n.typical_s)]
            typical = float(np.median(latency)) if latency else np.nan
            count, spent = int((drawn == tier).sum()), float(np.nansum(seconds[drawn == tier]))
            share = count / max(int(np.isfinite(drawn).sum()), 1)
            members = sum(node.tier == tier for node in nodes)
            row = [
                (str(tier), float(tier)),
                (str(members), float(members)),
                _number(typical, duration(typical)),
                (str(count), float(count)),
                (f"{100 * share:.0f} %", share),
                (duration(spent), spent),
            ]
            rows.append([*_named(label, run), *row])
    head = ("tier", "nodes", "median latency", "rounds", "share of rounds", "time of these rounds")
    return Table("Tiers", ("run", "seed", *head), rows, "Tier 0 holds the fastest nodes.")


def _nodes(every: Sequence[tuple[str, Run]]) -> Table:
    rows = []
    for label, run in every:
        fair = last_fairness(run.history)
        quality = fair.by_node if fair else {}
        for node in node_stats(run.history):
            seen = quality.get(node.identity, np.nan)
            row = [
                (node.identity, None),
                ("", None) if node.tier is None else (str(node.tier), float(node.tier)),
                _number(node.typical_s, duration(node.typical_s)),
                (str(node.selected), float(node.selected)),
                (str(node.lost), float(node.lost)),
                _number(seen, figure(fair.metric if fair else "", seen)),
            ]
            rows.append([*_named(label, run), *row])
    head = ("node", "tier", "median latency", "asked", "lost", "quality")
    caption = "Asked: how often it was selected. Lost: replies that did not count."
    return Table("Nodes", ("run", "seed", *head), rows, caption)


def _fairness(every: Sequence[tuple[str, Run]]) -> Table:
    found = [(label, run, fair) for label, run in every if (fair := last_fairness(run.history))]
    rows = [
        [
            *_named(label, run),
            (words(fair.metric), None),
            (figure(fair.metric, fair.worst), fair.worst),
            (figure(fair.metric, fair.mean), fair.mean),
            (str(fair.nodes), float(fair.nodes)),
            (str(fair.round), float(fair.round)),
        ]
        for label, run, fair in found
    ]
    head = ("metric", "worst tenth of the nodes", "mean", "nodes", "round")
    return Table("Fairness", ("run", "seed", *head), rows, "As last measured by the nodes.")


def _failures(every: Sequence[tuple[str, Run]]) -> Table:
    rows = []
    for label, run in every:
        counts = Counter((g.node, g.reason) for g in failure_groups(run.history) for _ in g.rounds)
        rows += [
            [*_named(label, run), (node, None), (reason, None), (str(count), float(count))]
            for (node, reason), count in counts.most_common()
        ]
    head = ("run", "seed", "node", "reason", "times")
    return Table("Failures", head, rows, "Each cost that reply and nothing else.")
