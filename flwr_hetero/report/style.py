"""One palette, and figures with their units."""

import math
import re
from collections.abc import Sequence

import numpy as np

# Shown for a figure that the history does not have.
UNKNOWN = "?"
# End of a key to its unit.
SUFFIXES = {"_s": "s", "_bytes": "bytes", "_mbps": "Mbit/s"}
TIMES = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
# Symbol of a unit to its size.
SPLITS = (("d", "h", 3600, 24, ""), ("h", "min", 60, 60, "02"), ("min", "s", 1, 60, "02"))
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def time_unit(longest_s: float) -> str:
    """Choose the unit for an axis of time: one of :data:`TIMES`."""
    return next((symbol for symbol, unit_s in TIMES.items() if longest_s >= 3 * unit_s), "s")


def duration(seconds: float) -> str:
    """Write a duration."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    # The smaller unit is rounded first: 59.6 minutes are an hour, not 60 minutes.
    for large, small, unit_s, per, digits in SPLITS:
        if (whole := round(seconds / unit_s)) >= per:
            return f"{whole // per} {large} {whole % per:{digits}} {small}"
    return f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Write a number of bytes."""
    if not math.isfinite(num_bytes):
        return UNKNOWN
    symbol, factor = size_unit(num_bytes)
    return f"{num_bytes / factor:.3g} {symbol}"


def size_unit(num_bytes: float) -> tuple[str, float]:
    """Choose the unit for a number of bytes: its symbol, and the bytes in it."""
    return next((unit for unit in BYTES.items() if num_bytes >= unit[1]), ("B", 1.0))


def is_share(metric: str) -> bool:
    """Return whether a metric is shown in percent."""
    return "acc" in metric.lower()


def figure(metric: str, value: float) -> str:
    """Write the value of a metric."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{100 * value:.1f} %" if is_share(metric) and 0 <= value <= 1 else f"{value:.4g}"


def words(key: str) -> str:
    """Turn a key of the history into words with a unit."""
    for suffix, unit in SUFFIXES.items():
        if key.endswith(suffix):
            return f"{words(key[: -len(suffix)])} ({unit})"
    return re.sub(r"\bacc\b", "accuracy", key.replace("_", " ").replace("-", " ").strip())


def heading(key: str) -> str:
    """Turn a key of the history into a heading."""
    text = words(key).replace("/", ": ")
    return text[:1].upper() + text[1:]


# Okabe and Ito's colours: distinct under all common forms of colour blindness.
BLUE, SKY, GREEN, ORANGE, RED = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00"
PURPLE, GREY = "#cc79a7", "#8c8c8c"
# From the fastest tier to the slowest.
TIER_RAMP = (BLUE, SKY, GREEN, ORANGE, RED)
RUN_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
# A method's colour on every page; FedAvg and random selection are one.
METHOD_COLOURS = {"fedavg": GREY, "fedbuff": SKY, "tifl": BLUE, "biased-local-sgd": RED}
METHOD_COLOURS |= {"cd-grab": GREEN, "mercury": PURPLE, "pgd": ORANGE}


def tier_colours(count: int) -> list[str]:
    """Return a colour per tier, from fast (blue) to slow (vermilion)."""
    ramp = np.array([[int(hue[i : i + 2], 16) for i in (1, 3, 5)] for hue in TIER_RAMP])
    places = np.linspace(0, len(ramp) - 1, max(count, 2))[:count]
    mixed = np.array([np.interp(places, range(len(ramp)), channel) for channel in ramp.T])
    return ["#" + bytes(colour).hex() for colour in mixed.T.round().astype(np.uint8)]


def method_colours(methods: Sequence[str]) -> list[str]:
    """Return a colour for each kind of run: its method's, or a free one where that is taken."""
    wanted = [METHOD_COLOURS.get(method, "") for method in methods]
    free = [colour for colour in RUN_COLOURS if colour not in wanted] or list(RUN_COLOURS)
    found: list[str] = []
    for colour in wanted:
        is_new = colour and colour not in found
        found.append(colour if is_new else free[0])
        free = free if is_new else [*free[1:], free[0]]
    return found
