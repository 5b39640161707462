"""Colours of pages, and how figures are written with their units."""

import re
from math import isfinite

# Shown for a figure that the history does not have.
UNKNOWN = "?"
# The end of a key tells its unit.
SUFFIXES = {"_s": "s", "_bytes": "bytes", "_mbps": "Mbit/s"}
# Units by size, the largest first.
TIMES = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def time_unit(longest_s: float) -> str:
    """Choose the unit for an axis of time: one of :data:`TIMES`."""
    return next((symbol for symbol, unit_s in TIMES.items() if longest_s >= 3 * unit_s), "s")


def duration(seconds: float) -> str:
    """Write a duration, such as "1 min 30 s"."""
    if not isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    # Round before choosing the unit: 59.6 minutes are an hour, not 60 minutes.
    hours = round(seconds / 3600)
    minutes = round(seconds / 60)
    whole_seconds = round(seconds)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    if whole_seconds >= 60:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02} s"
    return f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Write a number of bytes."""
    if not isfinite(num_bytes):
        return UNKNOWN
    symbol, unit = size_unit(num_bytes)
    return f"{num_bytes / unit:.3g} {symbol}"


def size_unit(num_bytes: float) -> tuple[str, float]:
    """Choose the unit for a number of bytes: its symbol, and the bytes in it."""
    return next((unit for unit in BYTES.items() if num_bytes >= unit[1]), ("B", 1.0))


def is_share(metric: str) -> bool:
    """Return whether a metric is shown in percent."""
    return "acc" in metric.lower()


def figure(metric: str, value: float) -> str:
    """Write the value of a metric."""
    if not isfinite(value):
        return UNKNOWN
    return f"{100 * value:.1f} %" if is_share(metric) and 0 <= value <= 1 else f"{value:.4g}"


def words(key: str) -> str:
    """Turn a key of the history into words with a unit."""
    for suffix, unit in SUFFIXES.items():
        if key.endswith(suffix):
            return f"{words(key.removesuffix(suffix))} ({unit})"
    return re.sub(r"\bacc\b", "accuracy", key.replace("_", " ").replace("-", " ").strip())


def heading(key: str) -> str:
    """Turn a key of the history into a heading."""
    text = words(key).replace("/", ": ")
    return text[:1].upper() + text[1:]


# The palette of Okabe and Ito can be told apart with all common forms of colour blindness.
BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
RED = "#d55e00"
PURPLE = "#cc79a7"
GREY = "#8c8c8c"
RUN_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
