"""The first chart of a page as an SVG: for readers without scripts, and until scripts have run."""

from collections.abc import Callable, Mapping
from math import ceil, floor, log10
from typing import Any

from flwr_hetero.report.style import figure

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 44
# Digits of ticks on a logarithmic axis; beyond so many powers of ten the powers alone.
DIGITS, MOST_POWERS = (1, 2, 5), 3
# Numbers that a chart can have; beyond them is nonsense of a node.
LEAST, MOST = 1e-100, 1e100

Scale = tuple[Callable[[float], float], list[float]]


def picture_of(curves: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return lines, ticks and target of the first metric in pixels; None if there is no line."""
    if not curves or not curves["metrics"]:
        return None
    metric, axis = curves["metrics"][0], curves["axes"][0]
    lines = []
    for line in curves["lines"]:
        found = line["curves"][metric["key"]][axis["key"]]
        pairs = zip(found["x"], found["y"], strict=True)
        # a logarithmic axis has no 0
        least = LEAST if axis["log"] else 0.0
        known = ((x, y) for x, y in pairs if None not in (x, y))
        points = [(x, y) for x, y in known if least <= x <= MOST and abs(y) <= MOST]
        lines += [(line, points)] if points else []
    if not lines:
        return None
    xs, ys = ([point[i] for _, points in lines for point in points] for i in range(2))
    target, is_share = metric["target"], metric["percent"] and 0 <= min(ys) <= max(ys) <= 1
    ys += [] if target is None else [target]
    x, x_ticks = _scale(xs, LEFT, WIDTH - RIGHT, logarithmic=axis["log"])
    y, y_ticks = _scale(ys, HEIGHT - BOTTOM, TOP)

    return {
        **{"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT},
        **{"bottom": HEIGHT - BOTTOM, "metric": metric["label"], "axis": axis["label"]},
        "x_ticks": [(x(value), f"{value:g}") for value in x_ticks],
        "y_ticks": [(y(v), f"{100 * v:.4g} %" if is_share else f"{v:.4g}") for v in y_ticks],
        "target": None if target is None else (y(target), figure(metric["key"], target)),
        "lines": [
            (line["label"], line["colour"], " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points))
            for line, points in lines
        ],
    }


def _scale(values: list[float], start: float, end: float, *, logarithmic: bool = False) -> Scale:
    """Return what turns a value into pixels, and round values to write on the axis."""
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * abs(high), LEAST):
        high = 10 * low if logarithmic else low + max(1.0, abs(low))
    if logarithmic:
        powers = range(floor(log10(low)), ceil(log10(high)) + 1)
        digits = DIGITS if len(powers) <= MOST_POWERS + 1 else (1,)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
    else:
        power = 10.0 ** floor(log10((high - low) / 4))
        step = next(power * d for d in (1, 2, 5, 10) if (high - low) / (power * d) <= 6)
        ticks = [step * n for n in range(ceil(low / step), floor(high / step) + 1)]

    def place(value: float) -> float:
        of, first, last = (log10(v) if logarithmic else v for v in (value, low, high))
        return round(start + (end - start) * (of - first) / (last - first), 1)

    return place, [tick for tick in ticks if low <= tick <= high]
