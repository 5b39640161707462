"""Curves of runs: columns, smoothing, when a target is reached, means over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero_studies.core.record import Line

Vector: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = dict[str, list[Any]]


def columns(points: Iterable[Mapping[str, Any]], missing: Any = None) -> Columns:
    """Turn points into columns, with what stands for a figure that a point lacks."""
    rows = list(points)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, missing) for row in rows] for name in names}


def rounded(curve: Columns, digits: int = 5) -> Columns:
    return {
        name: [round(v, digits) if isinstance(v, float) else v for v in column]
        for name, column in curve.items()
    }


def smooth(values: ArrayLike, window: int, *, centred: bool = False, whole: bool = False) -> Vector:
    """Average each value with those before it (``whole``: if there are enough) or around it."""
    array = np.asarray(values, float)
    if centred:
        padded = np.pad(array, window // 2, "edge")
        return np.asarray(np.convolve(padded, np.ones(window) / window, "valid"))
    # differences of sums: as quick for wide windows as for narrow ones
    sums = np.cumsum(np.insert(array, 0, 0.0))
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(ends - window, 0)
    means = np.asarray((sums[ends] - sums[starts]) / (ends - starts))
    return means[window - 1 :] if whole else means


def reached(values: ArrayLike, target: float, *, between: bool = False) -> float:
    """Return the place of the first value at the target, between two if wanted; NaN if never."""
    array = np.asarray(values, float)
    hits = np.flatnonzero(array >= target)
    if not len(hits):
        return nan
    place = int(hits[0])
    # nothing lies before the first value, and no line leads from an infinite one
    if place == 0 or not between or not isfinite(array[place - 1]):
        return float(place)
    before, there = array[place - 1], array[place]
    return place - 1 + float((target - before) / (there - before))


def at(column: ArrayLike, place: float) -> float:
    """Return a column's value at a place, between two rows by a straight line."""
    array = np.asarray(column, float)
    return float(np.interp(place, np.arange(len(array)), array))


def time_to(
    clock: ArrayLike,
    values: ArrayLike,
    target: float,
    *,
    below: bool = False,
    between: bool = True,
    never: float = inf,
) -> float:
    """Return what the clock says when values first are at the target, or ``below`` it."""
    # falling to a target is rising to its negative
    sign = -1.0 if below else 1.0
    place = reached(sign * np.asarray(values, float), sign * target, between=between)
    return never if np.isnan(place) else at(clock, place)


def last(line: Line, name: str, count: int) -> float:
    return float(np.mean(line["curve"][name][-count:]))


def mean(curves: Iterable[Columns], name: str) -> list[float]:
    return [float(np.mean(values)) for values in zip(*(c[name] for c in curves), strict=False)]


def over_time(
    clocks: Sequence[ArrayLike],
    values: Sequence[ArrayLike],
    *,
    start: float | None = None,
    count: int = 200,
    fold: Callable[..., Any] = np.mean,
) -> tuple[Vector, Vector]:
    """Fold curves of several seeds on a common clock of equal ratios, where all have values."""
    every = [np.asarray(clock, float) for clock in clocks]
    first = max(clock[0] for clock in every) if start is None else start
    # equal ratios: methods differ by factors of time
    grid = np.geomspace(first, min(clock[-1] for clock in every), count)
    both = zip(every, values, strict=True)
    found = [np.interp(grid, clock, np.asarray(own, float)) for clock, own in both]
    return grid, np.asarray(fold(found, axis=0))
