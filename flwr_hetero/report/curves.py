"""Curves of runs: metrics and figures of wrappers against time, rounds, bytes, device-seconds."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import CLOCKS, TIFL, Floats, History, Indices
from flwr_hetero.report.style import TIMES, heading, is_share, size_unit, time_unit

# Points of a mean over seeds, and metrics to choose from.
GRID, MAX_FIGURES = 100, 40
# Of a longer run every n-th round is drawn: a page stays small.
MAX_POINTS = 400
# Axes that are sums over the rounds so far.
SUMS = {"bytes": "bytes sent and received", "device_s": "time of all devices"}


class Line(NamedTuple):
    """Runs that are drawn as one curve: one run, or several seeds."""

    label: str
    colour: str
    histories: Sequence[History]


class Axis(NamedTuple):
    """What to draw against; values are divided by ``scale``."""

    key: str
    label: str
    scale: float


def curve_data(
    lines: Sequence[Line],
    metric: str | None,
    clock: str,
    target: float | None,
    logarithmic: Collection[str] = (),
) -> dict[str, Any]:
    """Return what the page draws of all runs; ``metric`` is shown first, ``target`` is its own.

    ``logarithmic``: axes that begin as such.
    """
    histories = [history for line in lines for history in line.histories]
    axes = axes_of(histories, clock)
    names = _names(histories, metric) if axes else []
    return {
        "axes": [{"key": a.key, "label": a.label, "log": a.key in logarithmic} for a in axes],
        "metrics": [
            {
                "key": name,
                "label": heading(name.rpartition("/")[2]),
                "section": name.rpartition("/")[0],
                "percent": is_share(name),
                "target": target if name == metric else None,
            }
            for name in names
        ],
        "lines": [
            {"label": label, "colour": colour, "curves": _curves(runs, names, axes)}
            for label, colour, runs in lines
        ],
    }


def axes_of(histories: Sequence[History], clock: str) -> list[Axis]:
    """Return the axes that all runs have, ``clock`` first."""
    found, units = [], {history.unit for history in histories}
    for key, label in (CLOCKS | SUMS).items():
        longest = [float(np.nanmax(column_of(h, key), initial=0.0)) for h in histories]
        # Rounds and server updates are no common axis.
        if not all(longest) or (key == "round" and len(units) > 1):
            continue
        if key == "bytes":
            symbol, scale = size_unit(max(longest))
            found.append(Axis(key, f"{label} ({symbol})", scale))
        elif key == "round":
            found.append(Axis(key, f"{units.pop()}s", 1.0))
        else:
            symbol = time_unit(max(longest))
            found.append(Axis(key, f"{label} ({symbol})", TIMES[symbol]))
    return sorted(found, key=lambda axis: axis.key != clock)


def column_of(history: History, key: str) -> Floats:
    """Return an axis of a run: traffic and device-seconds are added up."""
    if key == "bytes":
        both = np.array([history.column("bytes_up"), history.column("bytes_down")])
        return np.nancumsum(np.nansum(both, axis=0))
    return np.cumsum(history.busy_s) if key == "device_s" else history.column(key)


def drawn_rounds(count: int) -> Indices:
    """Return the places of the rounds that are drawn, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).astype(np.int64))


def _names(histories: Sequence[History], first: str | None) -> list[str]:
    """Return the metrics and the figures of wrappers that all runs have."""
    # TiFL's are drawn by tier, in charts of their own.
    known = [name for name, (section, _) in histories[0].names.items() if section != TIFL]
    shared = [name for name in known if all(name in history.names for history in histories)]
    return list(dict.fromkeys([*([] if first is None else [first]), *shared]))[:MAX_FIGURES]


def _curves(
    histories: Sequence[History], names: Sequence[str], axes: Sequence[Axis]
) -> dict[str, Any]:
    xs = {axis.key: [column_of(h, axis.key) / axis.scale for h in histories] for axis in axes}
    tables = {name: [history.range_of(name) for history in histories] for name in names}
    return {n: {key: _curve(x, table) for key, x in xs.items()} for n, table in tables.items()}


def _curve(columns: Sequence[Floats], tables: Sequence[Floats]) -> dict[str, list[float]]:
    """Return a run's points and their range, or mean and range of seeds on a common grid."""
    lines = []
    for x, table in zip(columns, tables, strict=True):
        known = np.flatnonzero(~np.isnan(x) & ~np.isnan(table[:, 1]))
        lines.append((x[known], table[known]))
    if len(lines) == 1:
        [(x, table)] = lines
        places = drawn_rounds(len(x))
        low, middle, high = table[places].T
        found = [x[places], middle, low, high]
    else:
        # Only where all seeds have values: a mean over fewer of them would jump.
        first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
        grid = np.linspace(first, last, GRID) if last > first else np.array([first])
        values = np.array([np.interp(grid, x, table[:, 1]) for x, table in lines])
        found = [grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)]
    keys = ("x", "y", "low", "high") if (found[2] < found[3]).any() else ("x", "y")
    return {key: rounded(column) for key, column in zip(keys, found, strict=False)}


def rounded(values: Floats) -> list[Any]:
    """Return numbers for the page: six digits, None where there is none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
