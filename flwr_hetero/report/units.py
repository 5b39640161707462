"""Figures as people read them: durations, sizes, percentages, names with units."""

import math
from typing import NamedTuple

SUFFIXES = {"_s": "s", "_bytes": "bytes", "_mbps": "Mbit/s"}
"""End of a key to the unit that it stands for, as everywhere in this package."""
UNKNOWN = "?"
"""Stands for a figure that the history does not have."""


class TimeUnit(NamedTuple):
    """A unit for an axis of time.

    Parameters
    ----------
    seconds : float
        Length of the unit in seconds.
    symbol : str
        For the axis.
    """

    seconds: float
    symbol: str


def time_unit(longest_s: float) -> TimeUnit:
    """Choose the unit in which a duration is a handy number.

    Parameters
    ----------
    longest_s : float
        Longest duration to show, in seconds.

    Returns
    -------
    TimeUnit
        Seconds, minutes, hours or days.

    Examples
    --------
    >>> time_unit(90.0), time_unit(7200.0)
    (TimeUnit(seconds=1.0, symbol='s'), TimeUnit(seconds=60.0, symbol='min'))
    """
    for unit in (TimeUnit(86400.0, "d"), TimeUnit(3600.0, "h"), TimeUnit(60.0, "min")):
        if longest_s >= 3 * unit.seconds:
            return unit
    return TimeUnit(1.0, "s")


def duration(seconds: float) -> str:
    """Write a duration.

    Parameters
    ----------
    seconds : float
        NaN means unknown.

    Returns
    -------
    str
        For instance ``2 min 13 s``.

    Examples
    --------
    >>> [duration(s) for s in (0.0123, 4.56, 133.0, 3720.0, 90000.0)]
    ['12.3 ms', '4.56 s', '2 min 13 s', '1 h 02 min', '1 d 1 h']
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1 and seconds:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 1440:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """Write a number of bytes.

    Parameters
    ----------
    num_bytes : float
        NaN means unknown.

    Returns
    -------
    str
        In decimal units.

    Examples
    --------
    >>> [size(n) for n in (512, 20480, 3.2e9)]
    ['512 B', '20.5 kB', '3.2 GB']
    """
    if not math.isfinite(num_bytes):
        return UNKNOWN
    for factor, symbol in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.3g} {symbol}"
    return f"{num_bytes:.0f} B"


def is_share(metric: str) -> bool:
    """Tell whether a metric is a share that reads best in percent.

    Parameters
    ----------
    metric : str
        Its name.

    Returns
    -------
    bool
        True for accuracies.

    Examples
    --------
    >>> is_share("eval-acc"), is_share("train-loss")
    (True, False)
    """
    return "acc" in metric.lower()


def figure(metric: str, value: float) -> str:
    """Write the value of a metric.

    Parameters
    ----------
    metric : str
        Its name; accuracies in [0, 1] are written in percent.
    value : float
        NaN means unknown.

    Returns
    -------
    str
        Short.

    Examples
    --------
    >>> figure("accuracy", 0.8766), figure("loss", 0.41234), figure("loss", float("nan"))
    ('87.7 %', '0.4123', '?')
    """
    if not math.isfinite(value):
        return UNKNOWN
    if is_share(metric) and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}"


def words(key: str) -> str:
    """Turn a key of the history into words with a unit.

    Parameters
    ----------
    key : str
        As in the history; a unit is its suffix.

    Returns
    -------
    str
        For axes.

    Examples
    --------
    >>> words("herding-bound"), words("transfer_s"), words("eval-acc")
    ('herding bound', 'transfer (s)', 'eval acc')
    """
    for suffix, unit in SUFFIXES.items():
        if key.endswith(suffix):
            return f"{words(key[: -len(suffix)])} ({unit})"
    return key.replace("_", " ").replace("-", " ").strip()


def heading(key: str) -> str:
    """Turn a key of the history into a heading.

    Parameters
    ----------
    key : str
        As for :func:`words`.

    Returns
    -------
    str
        With a capital letter.

    Examples
    --------
    >>> heading("eval-acc"), heading("herding/herding-bound")
    ('Eval acc', 'Herding: herding bound')
    """
    text = words(key).replace("/", ": ")
    return text[:1].upper() + text[1:]
