"""Curves of runs: columns, smoothing, times to targets, means over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero_studies.core.record import Line

Vector: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = dict[str, list[Any]]


def columns(points: Iterable[Mapping[str, Any]], missing: Any = None) -> Columns:
    """Turn points into columns, with a value for figures that a point lacks."""
    rows = list(points)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, missing) for row in rows] for name in names}


def rounded(curve: Columns, digits: int = 5) -> Columns:
    return {
        name: [round(v, digits) if isinstance(v, float) else v for v in column]
        for name, column in curve.items()
    }


def smooth(values: ArrayLike, window: int, *, centred: bool = False, whole: bool = False) -> Vector:
    """Average each value with those before it or around it.

    ``whole`` leaves out the first values, before which there are too few.
    """
    array = np.asarray(values, float)
    if centred:
        padded = np.pad(array, window // 2, "edge")
        return np.asarray(np.convolve(padded, np.ones(window) / window, "valid"))
    # Differences of sums are as fast for wide windows as for narrow ones.
    sums = np.cumsum(np.insert(array, 0, 0.0))
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(ends - window, 0)
    means = np.asarray((sums[ends] - sums[starts]) / (ends - starts))
    return means[window - 1 :] if whole else means


def reached(values: ArrayLike, target: float, *, between: bool = False) -> float:
    """Return the place of the first value at the target, or NaN; it may be between two."""
    array = np.asarray(values, float)
    hits = np.flatnonzero(array >= target)
    if not len(hits):
        return nan
    place = int(hits[0])
    # There is no line to the first value, nor from an infinite one.
    if place == 0 or not between or not isfinite(array[place - 1]):
        return float(place)
    before = array[place - 1]
    return place - 1 + float((target - before) / (array[place] - before))


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
    """Return the time at which values first reach the target, or fall below it."""
    # To fall to a target is to rise to its negative.
    sign = -1.0 if below else 1.0
    place = reached(sign * np.asarray(values, float), sign * target, between=between)
    return never if np.isnan(place) else at(clock, place)


def last(line: Line, name: str, count: int) -> float:
    return float(np.mean(line["curve"][name][-count:]))


def over_time(
    clocks: Sequence[ArrayLike],
    values: Sequence[ArrayLike],
    *,
    start: float | None = None,
    count: int = 200,
    fold: Callable[..., Any] = np.mean,
) -> tuple[Vector, Vector]:
    """Fold curves of several seeds over the times for which all have values.

    The times are spaced by equal ratios, because methods differ by factors of time.
    """
    arrays = [np.asarray(clock, float) for clock in clocks]
    first = max(clock[0] for clock in arrays) if start is None else start
    grid = np.geomspace(first, min(clock[-1] for clock in arrays), count)
    both = zip(arrays, values, strict=True)
    aligned = [np.interp(grid, clock, np.asarray(curve, float)) for clock, curve in both]
    return grid, np.asarray(fold(aligned, axis=0))
