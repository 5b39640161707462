"""Plots against rounds and time: metrics, durations, traffic, figures of the wrappers."""

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_hetero.report.history import (
    CLOCKS,
    FAIRNESS,
    FEDBUFF,
    METRICS,
    TIFL,
    History,
    as_dict,
    best_round,
    lower_is_better,
)
from flwr_hetero.report.nodes import num_tiers
from flwr_hetero.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    figure,
    heading,
    metric_axis,
    panels,
    positive_axis,
    round_axis,
    run_look,
    size,
    tier_colours,
    time_unit,
    zoom,
)

MAX_PANELS = 12
"""Panels of a figure; a caption says how many more there would be."""
MAX_LINES = 6
"""Longer lists are drawn as median and range."""
DRAWN = (TIFL, FEDBUFF, FAIRNESS)
"""Sections with a figure of their own."""
ROOM = 0.15
"""Height of a line of a legend, as a part of the panel, so that it covers no curve."""


def draw_main_metric(history: History) -> Figure | None:
    """Draw the main metric against time and against rounds."""
    history = history.thinned
    metric = history.main_metric()
    if metric is None:
        return None
    values, (name, clock) = history.metric(metric), history.clock
    unit = time_unit(float(np.nanmax(clock, initial=0)))
    drawn, (by_time, by_round) = panels(1, 2, 3.7, sharey=True)
    if np.isnan(clock).all():
        by_time.set_visible(False)
    else:
        _draw_progress(by_time, clock / unit.seconds, values, metric)
    by_time.set_xlabel(f"{CLOCKS[name]} ({unit.symbol})")
    by_time.set_title(f"{heading(metric)} against time")
    if history.rounds[0]["round"] == 0 and clock[0] > 0:
        by_time.axvspan(0, clock[0] / unit.seconds, color=GREY, alpha=0.25, lw=0, label="profiling")
        by_time.legend(loc="lower right")
    _draw_progress(by_round, history.column("round"), values, metric)
    best = best_round(history, metric)
    by_round.plot(history.column("round")[best], values[best], "o", ms=7, mfc="none", mec=RED)
    by_round.set_title(f"{heading(metric)} against {history.unit}s")
    round_axis(by_round, history.unit)
    by_round.set_ylabel("")
    return drawn


def draw_against_traffic(history: History) -> Figure | None:
    """Draw the main metric and the loss against the bytes that training has taken."""
    history = history.thinned
    known = (history.main_metric(), "loss")
    names = [n for n in dict.fromkeys(known) if n is not None and n in history.metrics(METRICS)]
    total = np.nancumsum(history.column("bytes_down") + history.column("bytes_up"))
    if not names or not total[-1]:
        return None
    drawn, axes = panels(1, len(names), 3.4)
    for axis, name in zip(axes, names, strict=True):
        _draw_progress(axis, total, history.metric(name), name)
        axis.xaxis.set_major_formatter(lambda value, _: size(value))
        axis.set_xlabel("traffic, both ways")
        axis.set_title(f"{heading(name)} against traffic")
    return drawn


def draw_other_metrics(history: History) -> Figure | None:
    """Draw every metric but the main one against rounds, a small panel each."""
    history = history.thinned
    names = other_metrics(history)[:MAX_PANELS]
    if not names:
        return None
    drawn, axes = _small_panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        _draw_line(axis, history.column("round"), history.metric(name), name)
        axis.set_title(heading(name))
        axis.set_ylabel("")
        round_axis(axis, history.unit)
    return drawn


def other_metrics(history: History) -> list[str]:
    """Return the metrics beside the main one."""
    others = [name for name in history.metrics(METRICS) if name != history.main_metric()]
    return [name for name in others if np.nansum(np.abs(history.metric(name)))]


def draw_round_times(history: History) -> Figure | None:
    """Draw how long each round took, estimates of the total, and the traffic."""
    history = history.thinned
    clock = history.clock[1]
    if len(clock) < 2 or np.isnan(clock).all():
        return None
    has_estimate = not np.isnan(history.column(TIFL, "exact_estimate_s")).all()
    drawn, axes = panels(1, 3 if has_estimate else 2, 3.2)
    _draw_durations(axes[0], history, np.diff(clock) / np.diff(history.column("round")))
    if has_estimate:
        unit = time_unit(float(np.nanmax(history.column(TIFL, "actual_s"))))
        estimates = {
            "actual": history.column(TIFL, "actual_s") / unit.seconds,
            "expected slowest": history.column(TIFL, "exact_estimate_s") / unit.seconds,
            "TiFL's Eq. 6": history.column(TIFL, "paper_estimate_s") / unit.seconds,
        }
        _draw_totals(axes[1], history, estimates, ((BLUE, "-"), (GREEN, "--"), (ORANGE, ":")))
        axes[1].set_ylabel(f"total ({unit.symbol})")
        axes[1].set_title("Estimated and actual time")
    traffic = {
        "down to the nodes": np.nancumsum(history.column("bytes_down")),
        "up to the server": np.nancumsum(history.column("bytes_up")),
    }
    _draw_totals(axes[-1], history, traffic, ((BLUE, "-"), (RED, "--")))
    axes[-1].yaxis.set_major_formatter(lambda value, _: size(value))
    axes[-1].set_ylabel("total")
    axes[-1].set_title("Traffic" if history.unit == "merge" else "Traffic of training")
    for axis in axes:
        round_axis(axis, history.unit)
    return drawn


def _small_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Make a figure of small panels, at most three in a row."""
    columns = 2 if count in (2, 4) else min(count, 3)
    rows = -(-count // columns)
    drawn, axes = panels(rows, columns, 2.5 * rows + 0.3)
    for axis in axes[count:]:
        axis.set_visible(False)
    return drawn, axes[:count]


def _draw_progress(
    axes: Axes, x: NDArray[np.float64], values: NDArray[np.float64], metric: str
) -> None:
    _draw_line(axes, x, values, metric)
    for end in np.column_stack([x, values])[~np.isnan(values) & ~np.isnan(x)][-1:].tolist():
        axes.plot(*end, "o", color=BLUE, markersize=6, clip_on=False)
        text = figure(metric, end[1])
        axes.annotate(text, end, (-2, 9), textcoords="offset points", ha="right", size=9.5)
    zoom(axes, values, falls=lower_is_better(metric))
    metric_axis(axes, metric, values)


def _draw_line(
    axes: Axes, x: NDArray[np.float64], values: NDArray[np.float64], metric: str
) -> None:
    known = ~np.isnan(values) & ~np.isnan(x)
    marker = "o" if known.sum() <= 30 else ""
    axes.plot(x[known], values[known], color=BLUE, marker=marker, markersize=3.5)
    axes.margins(x=0.02, y=0.14)
    metric_axis(axes, metric, values)


def _draw_durations(axes: Axes, history: History, seconds: NDArray[np.float64]) -> None:
    unit = time_unit(float(np.nanmax(seconds)))
    colours = [*tier_colours(num_tiers(history)), GREY if num_tiers(history) else BLUE]
    tiers = [int(t) if np.isfinite(t) else -1 for t in history.column(TIFL, "tier")[1:]]
    axes.scatter(
        history.column("round")[1:],
        seconds / unit.seconds,
        s=14,
        c=[colours[tier] for tier in tiers],
    )
    positive_axis(axes, seconds / unit.seconds)
    axes.set_ylabel(f"time ({unit.symbol})")
    axes.set_title(f"Time of each {history.unit}")


def _draw_totals(
    axes: Axes,
    history: History,
    totals: dict[str, NDArray[np.float64]],
    looks: tuple[tuple[str, str], ...],
) -> None:
    """Draw rising lines, with room for the legend above them."""
    for (label, total), (colour, style) in zip(totals.items(), looks, strict=True):
        axes.plot(history.column("round"), total, style, color=colour, label=label)
    bottom, top = axes.get_ylim()
    axes.set_ylim(0, bottom + 1.3 * (top - bottom) or 1)
    axes.legend(loc="upper left")


class Fan(NamedTuple):
    """A key of a wrapper over the rounds: one number a round, or several."""

    key: str
    rows: dict[int, dict[str, float]]
    labels: list[str]

    @property
    def is_wide(self) -> bool:
        """Whether a line for each number would be too many."""
        return len(self.labels) > MAX_LINES

    @property
    def rounds(self) -> NDArray[np.float64]:
        """Rounds that have it."""
        return np.array(list(self.rows), np.float64)

    @property
    def values(self) -> NDArray[np.float64]:
        """A row per round, a column per label."""
        table = [[row.get(label, np.nan) for label in self.labels] for row in self.rows.values()]
        return np.array(table)

    @property
    def spread(self) -> NDArray[np.float64]:
        """Lowest, median and highest number of each round."""
        quantiles = [np.percentile(list(row.values()), (0, 50, 100)) for row in self.rows.values()]
        return np.array(quantiles).T


def wrappers_of(history: History) -> list[str]:
    """Return the sections of a history that have something to draw here."""
    others = [name for name in history.wrapper_sections() if name not in DRAWN]
    return [name for name in others if fans(history, name)]


def fans(history: History, section: str) -> list[Fan]:
    """Collect the numeric figures of a wrapper."""
    history = history.thinned
    found: dict[str, dict[int, dict[str, float]]] = {}
    for record in history.rounds:
        for key, value in as_dict(record.get(section)).items():
            if numbers := _numbers(value):
                found.setdefault(key, {})[record["round"]] = numbers
    return [
        Fan(key, rows, list(dict.fromkeys(label for row in rows.values() for label in row)))
        for key, rows in found.items()
    ]


def draw_wrapper(history: History, section: str) -> Figure | None:
    """Draw the figures of a wrapper against rounds, a small panel each."""
    if not (shown := fans(history, section)[:MAX_PANELS]):
        return None
    drawn, axes = _small_panels(len(shown))
    for axis, fan in zip(axes, shown, strict=True):
        _draw_fan(axis, fan)
        axis.set_title(heading(fan.key) + (" (median, range)" if fan.is_wide else ""))
        round_axis(axis, history.unit)
    return drawn


def _draw_fan(axes: Axes, fan: Fan) -> None:
    marker = "o" if len(fan.rounds) <= 30 else ""
    if fan.is_wide:
        low, middle, high = fan.spread
        axes.fill_between(fan.rounds, low, high, color=BLUE, alpha=0.2, lw=0)
        axes.plot(fan.rounds, middle, color=BLUE, marker=marker, markersize=3)
        return
    for number, (label, column) in enumerate(zip(fan.labels, fan.values.T, strict=True)):
        look = run_look(number)
        axes.plot(fan.rounds, column, **look, marker=marker, markersize=3, label=label)
    if len(fan.labels) > 1:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + ROOM * (top - bottom) * -(-len(fan.labels) // 2))
        axes.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1)


def _numbers(value: Any) -> dict[str, float]:
    """Return the numbers in a value; none if it holds anything else."""
    if isinstance(value, list):
        value = {str(position): item for position, item in enumerate(value)}
    items = value if isinstance(value, dict) else {"": value}
    known = {label: item for label, item in items.items() if item is not None}
    if not all(isinstance(item, int | float) for item in known.values()):
        return {}
    return {label: float(item) for label, item in known.items()}
