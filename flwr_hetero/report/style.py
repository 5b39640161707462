"""One palette, and figures with their units."""

import io
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

SUFFIXES = {"_s": "s", "_bytes": "bytes", "_mbps": "Mbit/s"}
"""End of a key to its unit."""

UNKNOWN = "?"
"""Shown for a figure that the history does not have."""


class TimeUnit(NamedTuple):
    """A unit for an axis of time."""

    seconds: float
    symbol: str


def time_unit(longest_s: float) -> TimeUnit:
    """Choose the unit for a duration."""
    units = (TimeUnit(86400.0, "d"), TimeUnit(3600.0, "h"), TimeUnit(60.0, "min"))
    return next((unit for unit in units if longest_s >= 3 * unit.seconds), TimeUnit(1.0, "s"))


def duration(seconds: float) -> str:
    """Write a duration."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 1:
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
    """Write a number of bytes."""
    if not math.isfinite(num_bytes):
        return UNKNOWN
    for factor, symbol in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.3g} {symbol}"
    return f"{num_bytes:.0f} B"


def is_share(metric: str) -> bool:
    """Return whether a metric is shown in percent."""
    return "acc" in metric.lower()


def figure(metric: str, value: float) -> str:
    """Write the value of a metric."""
    if not math.isfinite(value):
        return UNKNOWN
    if is_share(metric) and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}"


def words(key: str) -> str:
    """Turn a key of the history into words with a unit."""
    for suffix, unit in SUFFIXES.items():
        if key.endswith(suffix):
            return f"{words(key[: -len(suffix)])} ({unit})"
    return key.replace("_", " ").replace("-", " ").strip()


def heading(key: str) -> str:
    """Turn a key of the history into a heading."""
    text = words(key).replace("/", ": ")
    return text[:1].upper() + text[1:]


# Okabe and Ito's colours: distinct under all common forms of colour blindness.
BLUE, SKY, GREEN, ORANGE, RED = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00"
GREY = "#8c8c8c"

TIER_RAMP = (BLUE, SKY, GREEN, ORANGE, RED)
"""From the fastest tier to the slowest."""

PURPLE = "#cc79a7"

RUN_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
METHOD_COLOURS = {
    "fedavg": GREY,
    "fedbuff": SKY,
    "tifl": BLUE,
    "biased-local-sgd": RED,
    "cd-grab": GREEN,
    "mercury": PURPLE,
    "pgd": ORANGE,
}
"""A method's colour on every page; FedAvg and random selection are one."""
RUN_STYLES = ("-", "--", "-.", ":")

DPI = 144
WIDTH = 10.0
"""Inches; shown across the page."""

PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")


class Theme(NamedTuple):
    """Colours of background and text."""

    paper: str
    ink: str
    muted: str
    grid: str

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which figures are drawn in this theme."""
        return mpl.rc_context(
            {
                "figure.facecolor": self.paper,
                "axes.facecolor": self.paper,
                "savefig.facecolor": self.paper,
                "legend.facecolor": self.paper,
                "text.color": self.ink,
                "text.parse_math": False,  # names of nodes may hold a dollar sign
                "axes.titlecolor": self.ink,
                "axes.labelcolor": self.muted,
                "axes.edgecolor": self.grid,
                "xtick.color": self.grid,
                "ytick.color": self.grid,
                "xtick.labelcolor": self.muted,
                "ytick.labelcolor": self.muted,
                "grid.color": self.grid,
                "grid.linewidth": 0.8,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.titlelocation": "left",
                "axes.titlesize": 11,
                "axes.titleweight": "bold",
                "axes.labelsize": 10,
                "font.size": 10,
                "legend.frameon": False,
                "legend.fontsize": 9,
                "lines.linewidth": 1.8,
                "lines.solid_capstyle": "round",
                "hatch.linewidth": 0.8,
                "savefig.dpi": DPI,
            }
        )


LIGHT = Theme(paper="#ffffff", ink="#1c2430", muted="#5a6675", grid="#e3e7ec")
DARK = Theme(paper="#171c23", ink="#e8ecf1", muted="#a3afbd", grid="#303843")


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure of the page's width with a grid of panels."""
    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    return drawn, list(drawn.subplots(rows, columns, squeeze=False, **options).flat)


def png(drawn: Figure) -> bytes:
    """Render a figure."""
    file = io.BytesIO()
    drawn.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def tier_colours(count: int) -> list[str]:
    """Return a colour per tier, from fast (blue) to slow (vermilion)."""
    ramp = LinearSegmentedColormap.from_list("tiers", TIER_RAMP, N=257)
    return [to_hex(ramp(position)) for position in np.linspace(0, 1, max(count, 2))][:count]


def run_look(number: int) -> dict[str, Any]:
    """Return colour and line style of the n-th run or line of a panel."""
    style = RUN_STYLES[number // len(RUN_COLOURS) % len(RUN_STYLES)]
    return {"color": RUN_COLOURS[number % len(RUN_COLOURS)], "linestyle": style}


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


def metric_axis(axes: Axes, metric: str, values: NDArray[np.float64]) -> None:
    """Label the y axis for a metric; accuracies in percent."""
    shown = values[np.isfinite(values)]
    if is_share(metric) and len(shown) and shown.min() >= 0 and shown.max() <= 1:
        axes.yaxis.set_major_formatter(PERCENT)
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, 0.0), min(top, 1.03))
    axes.set_ylabel(words(metric.rpartition("/")[2]))


def zoom(axes: Axes, values: NDArray[np.float64], *, falls: bool) -> None:
    """Leave the first steep steps of a long curve out of the y axis."""
    shown = values[np.isfinite(values)]
    if len(shown) > 20:
        low, high = np.quantile(shown, (0.0, 0.95) if falls else (0.05, 1.0))
        margin = 0.1 * (high - low)
        if margin > 0:
            axes.set_ylim(low - margin, high + margin)


def round_axis(axes: Axes, unit: str = "round") -> None:
    """Label the x axis for rounds, or merges."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
    axes.set_xlabel(unit)


def positive_axis(axes: Axes, values: NDArray[np.float64]) -> None:
    """Start the y axis at 0, or make it logarithmic where the values differ much."""
    shown = values[np.isfinite(values) & (values > 0)]
    ratio = shown.max() / shown.min() if len(shown) else 1.0
    if ratio > 20:
        axes.set_yscale("log")
        subs = (1.0, 2.0, 5.0) if ratio < 500 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
