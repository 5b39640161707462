"""How well and how fast: metrics, time of each round, traffic."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_hetero.report.fleet_facts import TIFL, num_tiers
from flwr_hetero.report.history import METRICS, History
from flwr_hetero.report.progress import CLOCKS, best_round, lower_is_better
from flwr_hetero.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    metric_axis,
    panels,
    positive_axis,
    round_axis,
    tier_colours,
    zoom,
)
from flwr_hetero.report.units import figure, heading, size, time_unit

MAX_PANELS = 12
"""Panels of a figure; a caption says how many more there would be."""


def draw_main_metric(history: History) -> Figure | None:
    """Draw the main metric against time and against rounds.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if the run has no metrics.
    """
    metric = history.main_metric()
    if metric is None:
        return None
    values, clock = history.metric(metric), clock_of(history)
    unit = time_unit(float(np.nanmax(clock, initial=0)))
    drawn, (by_time, by_round) = panels(1, 2, 3.7, sharey=True)
    if np.isnan(clock).all():
        by_time.set_visible(False)
    else:
        _draw_progress(by_time, clock / unit.seconds, values, metric)
    by_time.set_xlabel(f"{CLOCKS[clock_key(history)]} ({unit.symbol})")
    by_time.set_title(f"{heading(metric)} against time")
    _shade_profiling(by_time, history, unit.seconds)
    _draw_progress(by_round, history.column("round"), values, metric)
    best = best_round(history, metric)
    by_round.plot(history.column("round")[best], values[best], "o", ms=7, mfc="none", mec=RED)
    by_round.set_title(f"{heading(metric)} against rounds")
    round_axis(by_round)
    by_round.set_ylabel("")
    return drawn


def draw_against_traffic(history: History) -> Figure | None:
    """Draw the main metric and the loss against the bytes that training has taken.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if the run has no metrics or no count of bytes.
    """
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
    """Draw every metric but the main one against rounds, a small panel each.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if there is no other metric.
    """
    names = other_metrics(history)[:MAX_PANELS]
    if not names:
        return None
    drawn, axes = small_panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        _draw_line(axis, history.column("round"), history.metric(name), name)
        axis.set_title(heading(name))
        axis.set_ylabel("")
        round_axis(axis)
    return drawn


def other_metrics(history: History) -> list[str]:
    """Return the metrics beside the main one.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    list of str
        Without those that are always zero.
    """
    others = [name for name in history.metrics(METRICS) if name != history.main_metric()]
    return [name for name in others if np.nansum(np.abs(history.metric(name)))]


def draw_round_times(history: History) -> Figure | None:
    """Draw how long each round took, estimates of the total, and the traffic.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if there are no rounds after round 0.
    """
    rounds, clock = history.column("round"), clock_of(history)
    if len(rounds) < 2 or np.isnan(clock).all():
        return None
    has_estimate = not np.isnan(history.column(TIFL, "exact_estimate_s")).all()
    drawn, axes = panels(1, 3 if has_estimate else 2, 3.2)
    _draw_durations(axes[0], history, rounds[1:], np.diff(clock))
    if has_estimate:
        _draw_estimates(axes[1], history)
    _draw_traffic(axes[-1], history)
    for axis in axes:
        round_axis(axis)
    return drawn


def clock_of(history: History) -> NDArray[np.float64]:
    """Return the fleet's clock, or the server's where the history has no other.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    ndarray of float64, shape (num_rounds,)
        Seconds since the start at the end of each round.
    """
    return history.column(clock_key(history))


def clock_key(history: History) -> str:
    """Tell which clock :func:`clock_of` returns.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    str
        ``virtual_s``, or ``wall_s`` where the fleet's clock is unknown.
    """
    return "virtual_s" if np.nansum(history.column("virtual_s")) > 0 else "wall_s"


def small_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Make a figure of small panels, at most three in a row.

    Parameters
    ----------
    count : int
        Panels wanted.

    Returns
    -------
    figure : Figure
        With just that many panels visible.
    axes : list of Axes, length count
        Row by row.
    """
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


def _shade_profiling(axes: Axes, history: History, unit_s: float) -> None:
    end = clock_of(history)[0] / unit_s
    if history.rounds[0]["round"] == 0 and end > 0:
        axes.axvspan(0, end, color="#8c8c8c", alpha=0.25, lw=0, label="profiling")
        axes.legend(loc="lower right")


def _draw_durations(
    axes: Axes, history: History, rounds: NDArray[np.float64], seconds: NDArray[np.float64]
) -> None:
    unit = time_unit(float(np.nanmax(seconds)))
    colours = [*tier_colours(num_tiers(history)), "#8c8c8c" if num_tiers(history) else BLUE]
    tiers = [int(t) if np.isfinite(t) else -1 for t in history.column(TIFL, "tier")[1:]]
    axes.scatter(rounds, seconds / unit.seconds, s=14, c=[colours[tier] for tier in tiers])
    positive_axis(axes, seconds / unit.seconds)
    axes.set_ylabel(f"time ({unit.symbol})")
    axes.set_title("Time of each round")


def _draw_estimates(axes: Axes, history: History) -> None:
    lines = {
        "actual": ("actual_s", BLUE, "-"),
        "expected slowest": ("exact_estimate_s", GREEN, "--"),
        "TiFL's Eq. 6": ("paper_estimate_s", ORANGE, ":"),
    }
    unit = time_unit(float(np.nanmax(history.column(TIFL, "actual_s"))))
    for label, (key, colour, style) in lines.items():
        seconds = history.column(TIFL, key) / unit.seconds
        axes.plot(history.column("round"), seconds, style, color=colour, label=label)
    axes.set_ylabel(f"total ({unit.symbol})")
    axes.set_title("Estimated and actual time")
    _legend_above(axes)


def _draw_traffic(axes: Axes, history: History) -> None:
    for label, key, colour, style in (
        ("down to the nodes", "bytes_down", BLUE, "-"),
        ("up to the server", "bytes_up", RED, "--"),
    ):
        total = np.nancumsum(history.column(key))
        axes.plot(history.column("round"), total, style, color=colour, label=label)
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.set_ylabel("total")
    axes.set_title("Traffic of training")
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    """Put the legend of rising lines over them, with room of its own."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(0, bottom + 1.3 * (top - bottom) or 1)
    axes.legend(loc="upper left")
