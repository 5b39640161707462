"""Plots of a run without rounds, and of how good the model is on each node."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from flwr_hetero.report.history import FAIRNESS, FEDBUFF, History, as_dict
from flwr_hetero.report.nodes import last_fairness, merged_replies, node_stats, num_tiers
from flwr_hetero.report.plots_nodes import node_colours
from flwr_hetero.report.style import (
    BLUE,
    GREY,
    PERCENT,
    RED,
    TimeUnit,
    metric_axis,
    panels,
    positive_axis,
    time_unit,
    words,
)

MAX_BINS = 200
"""Longer runs are drawn as median and range of so many spans of time."""
WIDE = 5
"""Speeds that differ more are on a logarithmic axis."""
MAX_DOTS = 2000
"""Nodes in a scatter plot; of a larger fleet every n-th."""

Rows = Sequence[Sequence[float]]


def draw_merges(history: History) -> Figure | None:
    """Draw staleness and age over time, nodes at work, and what each node contributes."""
    found = [as_dict(record.get(FEDBUFF)) for record in history.rounds]
    kept = [i for i, info in enumerate(found) if _is_whole(info)]
    if not kept:
        return None
    clock = history.clock[1]
    unit = time_unit(float(np.nanmax(clock, initial=0)))
    times, infos = clock[kept], [found[i] for i in kept]
    drawn, axes = panels(2, 3, 5.6)
    over_time = axes[:3]
    stale, ages = ([info[key] for info in infos] for key in ("staleness", "age_s"))
    _draw_spread(axes[0], times / unit.seconds, stale)
    axes[0].set_title("Staleness (median, range)")
    axes[0].set_ylabel("merges")
    _draw_spread(axes[1], times / unit.seconds, ages)
    positive_axis(axes[1], np.array([age for row in ages for age in row]))
    axes[1].set_title("Age of updates (median, range)")
    axes[1].set_ylabel("s")
    _draw_at_work(axes[2], history, unit)
    for axis in over_time:
        axis.set_xlabel(f"time ({unit.symbol})")
    _draw_clipped(axes[3], times / unit.seconds, infos)
    axes[3].set_xlabel(f"time ({unit.symbol})")
    _draw_by_age(axes[4:], history)
    return drawn


def _is_whole(info: dict[str, Any]) -> bool:
    """Return whether a merge says how stale and how old its updates were."""
    columns = [info.get(key) for key in ("staleness", "age_s")]
    return all(column and None not in column for column in columns)


def _draw_spread(axes: Axes, times: NDArray[np.float64], rows: Rows) -> None:
    middle, found = _in_spans(times, rows)
    low, median, high = np.array([np.percentile(values, (0, 50, 100)) for values in found]).T
    axes.fill_between(middle, low, high, color=BLUE, alpha=0.2, lw=0)
    axes.plot(middle, median, color=BLUE)


def _in_spans(
    times: NDArray[np.float64], rows: Rows
) -> tuple[NDArray[np.float64], list[list[float]]]:
    """Put neighbouring merges together where there are many."""
    groups = [g for g in np.array_split(np.arange(len(times)), MAX_BINS) if len(g)]
    found = [[value for place in group for value in rows[place]] for group in groups]
    return np.array([times[group].mean() for group in groups]), found


def _draw_at_work(axes: Axes, history: History, unit: TimeUnit) -> None:
    """Draw device-seconds per second: how many nodes were at work."""
    clock, busy = history.clock[1], history.column("device_s")
    total = np.nancumsum(busy)
    edges = np.unique(np.linspace(0, len(clock) - 1, MAX_BINS + 1).astype(int))
    if len(edges) < 2:
        return axes.set_visible(False)
    seconds = np.diff(clock[edges])
    with np.errstate(invalid="ignore", divide="ignore"):
        at_work = np.where(seconds > 0, np.diff(total[edges]) / seconds, np.nan)
    axes.step(clock[edges] / unit.seconds, [*at_work, *at_work[-1:]], where="post", color=BLUE)
    axes.set_ylim(0, 1.15 * max(np.nanmax(at_work, initial=0), 1))
    axes.set_title("Nodes at work")
    return None


def _draw_clipped(axes: Axes, times: NDArray[np.float64], infos: list[dict[str, Any]]) -> None:
    rows = [[info.get("clipped_share") or 0.0] for info in infos]
    middle, found = _in_spans(times, rows)
    axes.plot(middle, [np.mean(values) for values in found], color=BLUE)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 0.01))
    axes.set_title("Weight cut off by max_weight")


def _draw_by_age(axes: Sequence[Axes], history: History) -> None:
    """Draw a dot per node: how much slow nodes take part, and how stale they are."""
    replies = merged_replies(history)
    colour_of = node_colours(node_stats(history), num_tiers(history))
    names = list(replies)[:: 1 + len(replies) // MAX_DOTS]
    age = np.array([np.median(replies[name].age_s) for name in names])
    counts = np.array([len(replies[name].age_s) for name in names])
    stale = np.array([np.mean(replies[name].staleness) for name in names])
    colours = [colour_of.get(name, BLUE) for name in names]
    for axis, values in zip(axes, (counts, stale), strict=True):
        axis.scatter(age, values, s=22, c=colours, alpha=0.8, lw=0)
        if len(age) and age.min() > 0 and age.max() > WIDE * age.min():
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(bottom=0)
        axis.set_xlabel("median age of its updates (s)")
    axes[0].set_title("Replies of each node")
    axes[1].set_title("Mean staleness of each node")


def draw_fairness(history: History) -> Figure | None:
    """Draw the accuracy on all nodes and on the worst tenth over time, and of each node now."""
    last = last_fairness(history)
    if last is None:
        return None
    clock = history.clock[1]
    unit = time_unit(float(np.nanmax(clock, initial=0)))
    drawn, (over_time, by_node) = panels(1, 2, 3.4, width_ratios=(1, 1))
    for key, colour, label in (("mean", BLUE, "mean"), ("worst-tenth", RED, "worst tenth")):
        values = history.column(FAIRNESS, key)
        known = ~np.isnan(values)
        x = clock[known] / unit.seconds
        over_time.plot(x, values[known], color=colour, label=label, marker="o", markersize=2.5)
    over_time.legend(loc="best")
    over_time.set_xlabel(f"time ({unit.symbol})")
    over_time.set_title(f"{words(last.metric).capitalize()} of the nodes")
    nodes, count = node_stats(history), num_tiers(history)
    timed = [node.identity for node in nodes if node.identity in last.by_node]
    names = list(dict.fromkeys([*timed, *last.by_node]))
    values = np.array([last.by_node[name] for name in names])
    colour_of = node_colours(nodes, count)
    colours = [colour_of.get(name, GREY if count else BLUE) for name in names]
    by_node.scatter(np.arange(len(names)), values, s=24, c=colours, lw=0)
    by_node.axhline(last.mean, color=GREY, ls="--", lw=1.2)
    by_node.set_xticks([])
    by_node.set_xlabel("nodes, fast to slow")
    title = f"The {len(names)} worst of {last.nodes}" if last.nodes > len(names) else "Each node"
    by_node.set_title(f"{title}, as last measured")
    for axis, data in ((over_time, history.column(FAIRNESS, "mean")), (by_node, values)):
        metric_axis(axis, last.metric, data)
    return drawn
