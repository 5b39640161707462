"""Curves of runs: metrics and figures of wrappers against time, rounds, bytes, device-seconds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import CLOCKS, Floats, History, Indices
from flwr_hetero.report.style import BLUE, TIMES, heading, is_share, size_unit, time_unit

# Points of a mean over seeds.
MEAN_POINTS = 100
# Metrics that readers can choose from.
MAX_METRICS = 40
# Of a longer run only so many rounds are drawn, so that a page stays small.
MAX_POINTS = 400
# An axis is logarithmic if the shortest run ends at less than this share of the longest.
LOG_SHARE = 0.2
# Axes that add up a figure of the rounds.
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
    log: bool
    """Whether it is logarithmic at first, so that short runs are not squeezed into its edge."""


def curve_data(
    lines: Sequence[Line], metric: str | None, clock: str, target: float | None
) -> dict[str, Any]:
    """Return what the page draws of all runs.

    The page shows ``metric``, whose target is ``target``, and the axis ``clock`` first.
    """
    histories = [history for line in lines for history in line.histories]
    axes = axes_of(histories, clock)
    names = _names(histories, metric) if axes else []
    return {
        "axes": [axis._asdict() for axis in axes],
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
    """Return the axes that all runs have, ``clock`` first.

    The unit of an axis suits the shortest run. On a logarithmic axis it suits the first round.
    """
    axes = []
    units = {history.unit for history in histories}
    for key, label in (CLOCKS | SUMS).items():
        columns = [column_of(history, key) for history in histories]
        ends = [float(np.nanmax(column, initial=0.0)) for column in columns]
        if not all(ends):
            continue
        least = min(ends)
        is_log = least < LOG_SHARE * max(ends)
        if is_log:
            least = min(float(column[column > 0].min()) for column in columns)
        if key == "bytes":
            symbol, scale = size_unit(least)
            axes.append(Axis(key, f"{label} ({symbol})", scale, is_log))
        elif key != "round":
            symbol = time_unit(least)
            axes.append(Axis(key, f"{label} ({symbol})", TIMES[symbol], is_log))
        # Rounds and server updates cannot share an axis.
        elif len(units) == 1:
            axes.append(Axis(key, f"{histories[0].unit}s", 1.0, is_log))
    return sorted(axes, key=lambda axis: axis.key != clock)


def column_of(history: History, key: str) -> Floats:
    """Return the values of a run on an axis; traffic and device-seconds are added up."""
    if key == "bytes":
        return np.cumsum(history.traffic)
    return np.cumsum(history.busy_s) if key == "device_s" else history.column(key)


def drawn_rounds(count: int) -> Indices:
    """Return the places of the rounds that are drawn, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).astype(np.int64))


def _names(histories: Sequence[History], first: str | None) -> list[str]:
    """Return the metrics and the figures of wrappers that all runs have."""
    names = [] if first is None else [first]
    for name in histories[0].names:
        if name != first and all(name in history.names for history in histories):
            names.append(name)
    return names[:MAX_METRICS]


def _curves(
    histories: Sequence[History], names: Sequence[str], axes: Sequence[Axis]
) -> dict[str, Any]:
    """Return a curve for each metric and axis."""
    xs = {axis.key: [column_of(h, axis.key) / axis.scale for h in histories] for axis in axes}
    curves = {}
    for name in names:
        ranges = [history.range_of(name) for history in histories]
        curves[name] = {key: _curve(x, ranges) for key, x in xs.items()}
    return curves


def _curve(xs: Sequence[Floats], ranges: Sequence[Floats]) -> dict[str, list[Any]]:
    """Return the points of one run and their range, or the mean and the range of several seeds."""
    runs = []
    for x, values in zip(xs, ranges, strict=True):
        has_point = ~np.isnan(x) & ~np.isnan(values[:, 1])
        runs.append((x[has_point], values[has_point]))
    if len(runs) == 1:
        x, values = runs[0]
        places = drawn_rounds(len(x))
        x = x[places]
        low, middle, high = values[places].T
    else:
        # Average only where all seeds have values: the mean would jump where one ends.
        first = max(x[0] for x, _ in runs)
        last = min(x[-1] for x, _ in runs)
        x = np.linspace(first, last, MEAN_POINTS) if last > first else np.array([first])
        seeds = np.array([np.interp(x, run_x, values[:, 1]) for run_x, values in runs])
        low = seeds.min(axis=0)
        middle = seeds.mean(axis=0)
        high = seeds.max(axis=0)
    curve = {"x": rounded(x), "y": rounded(middle)}
    return curve | {"low": rounded(low), "high": rounded(high)} if (low < high).any() else curve


def rounded(values: Floats) -> list[Any]:
    """Return numbers for the page: six digits, None where there is none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def panels_of(history: History, clock: str) -> list[dict[str, Any]]:
    """Return the charts beside the curves of one run: the time of each round, if it is known."""
    axes = axes_of([history], clock)
    seconds = history.clock[1]
    if not axes or len(history.rounds) < 2 or np.isnan(seconds).all():
        return []
    places = drawn_rounds(len(history.rounds))
    # If some rounds are not drawn, a dot is the mean over the rounds since the one before.
    per_round = np.diff(seconds[places]) / np.diff(history.column("round")[places])
    unit = time_unit(float(np.nanmax(per_round, initial=0.0)))
    dots = {
        "name": f"one {history.unit}",
        "mode": "markers",
        "marker": {"color": BLUE, "size": 6},
        "y": [None, *rounded(per_round / TIMES[unit])],
    }
    chart = {
        "title": f"Time of each {history.unit}",
        "traces": [dots],
        "yaxis": {"title": {"text": f"time ({unit})"}, "rangemode": "tozero"},
        "x": {a.key: rounded(column_of(history, a.key)[places] / a.scale) for a in axes},
    }
    return [chart]
