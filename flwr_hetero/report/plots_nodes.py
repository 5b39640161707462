"""Plots of tiers and of nodes."""

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flwr_hetero.report.history import TIFL, History
from flwr_hetero.report.nodes import NodeStats, node_stats, num_tiers, of_tiers
from flwr_hetero.report.style import (
    BLUE,
    GREY,
    PERCENT,
    WIDTH,
    metric_axis,
    panels,
    positive_axis,
    round_axis,
    tier_colours,
)

HEIGHTS = {"tier": 1.9, "tier_probs": 1.5, "credits": 1.5, "tier_accuracy": 1.9}
"""Inches of each panel."""


def draw_tiers(history: History) -> Figure | None:
    """Draw the tier of each round and, below it, what its choice depends on."""
    count = num_tiers(history)
    if count < 2:
        return None
    few = history.thinned
    figures = {key: _over_rounds(few, key, count) for key in HEIGHTS if key != "tier"}
    shown = ["tier", *(key for key, values in figures.items() if not np.isnan(values).all())]
    heights = [HEIGHTS[key] for key in shown]
    drawn = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    axes = drawn.subplots(
        len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    ).ravel()
    _draw_choice(axes[0], history, count)
    draw = {"tier_probs": _draw_probs, "credits": _draw_credits, "tier_accuracy": _draw_accuracy}
    rounds = np.append(few.column("round"), history.last_round + 0.5)
    for axis, key in zip(axes[1:], shown[1:], strict=True):
        draw[key](axis, rounds, figures[key])
    axes[0].set_xlim(rounds[0], rounds[-1])
    round_axis(axes[-1])
    return drawn


def tier_name(tier: int, count: int) -> str:
    """Return a tier's name for people."""
    role = {0: " (fastest)", count - 1: " (slowest)"}.get(tier, "") if count > 1 else ""
    return f"tier {tier}{role}"


def _draw_choice(axes: Axes, history: History, count: int) -> None:
    tiers, rounds = history.thinned.column(TIFL, "tier"), history.thinned.column("round")
    every = history.column(TIFL, "tier")
    total = max(int(np.isfinite(every).sum()), 1)
    width = np.clip(0.8 * 72 * 0.75 * WIDTH / len(rounds), 0.8, 9)  # most of a round's share
    for tier, colour in enumerate(tier_colours(count)):
        axes.vlines(rounds[tiers == tier], tier - 0.38, tier + 0.38, color=colour, lw=width)
        times = int((every == tier).sum())
        text = f"{times} round{'s' * (times != 1)}, {100 * times / total:.0f} %"
        axes.text(1.01, tier, text, transform=axes.get_yaxis_transform(), va="center", size=9)
    axes.set_yticks(range(count), [tier_name(tier, count) for tier in range(count)])
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(visible=False)
    axes.set_title("Tier that trained in each round")


def _draw_probs(axes: Axes, rounds: NDArray[np.float64], probs: NDArray[np.float64]) -> None:
    look: dict[str, Any] = {"alpha": 0.85, "lw": 0, "step": "post"}  # passed on to fill_between
    axes.stackplot(rounds, np.nan_to_num(probs).T, colors=tier_colours(probs.shape[1]), **look)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(visible=False)
    axes.set_ylabel("probability")
    axes.set_title("Probability of each tier (fastest at the bottom)")


def _draw_credits(axes: Axes, rounds: NDArray[np.float64], credit: NDArray[np.float64]) -> None:
    _draw_steps(axes, rounds, credit)
    axes.set_ylim(bottom=-0.04 * np.nanmax(credit))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("rounds left")
    axes.set_title("Credits of each tier")


def _draw_accuracy(axes: Axes, rounds: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    _draw_steps(axes, rounds, values)
    metric_axis(axes, "accuracy", values.ravel())
    axes.set_title("Accuracy of each tier, as last measured")


def _draw_steps(axes: Axes, rounds: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    for column, colour in zip(values.T, tier_colours(values.shape[1]), strict=True):
        axes.step(rounds, column, where="post", color=colour)


def _over_rounds(history: History, key: str, count: int) -> NDArray[np.float64]:
    """Return a figure of each tier after each round; the last row is repeated, to end steps."""
    table = np.full((len(history.rounds), count), np.nan)
    for row, record in zip(table, history.rounds, strict=True):
        values = of_tiers(record, key)
        row[: len(values)] = values
    return np.vstack([table, table[-1:]])


MAX_NAMES = 40
"""Up to so many nodes are named on the axis."""


def draw_latency(history: History) -> Figure | None:
    """Draw each node's latencies, ordered and coloured by tier."""
    nodes = [node for node in node_stats(history) if np.isfinite(node.typical_s)]
    if not nodes:
        return None
    drawn, [axes] = panels(1, 1, 3.6)
    place, colours = np.arange(len(nodes)), np.array(_colours(nodes, num_tiers(history)))
    seen = np.array([len(node.latency_s) > 0 for node in nodes])
    low = np.array([min(node.latency_s) for node in nodes if len(node.latency_s)])
    high = np.array([max(node.latency_s) for node in nodes if len(node.latency_s)])
    typical = np.array([node.typical_s for node in nodes])
    profiled = np.array([node.profiled_s for node in nodes])
    room = 0.9 * 72 * WIDTH / len(nodes)  # points per node
    axes.vlines(place[seen], low, high, color=colours[seen], lw=min(3, room), alpha=0.35)
    axes.scatter(place[seen], typical[seen], s=min(5, room) ** 2, c=colours[seen], zorder=3)
    axes.scatter(place, profiled, s=min(11, room) ** 2, c=colours, marker="_", lw=1.8, zorder=3)
    positive_axis(axes, np.concatenate([typical, profiled, low, high]))
    axes.set_ylabel("latency (s)")
    axes.set_title("Latency of each node: median (dot), range (bar), profiled (dash)")
    _name_nodes(axes, nodes, num_tiers(history), "upper left")
    return drawn


def draw_selection(history: History) -> Figure | None:
    """Draw how often each node was asked to train, and how often its reply did not count."""
    nodes = node_stats(history)
    counts = np.array([node.selected for node in nodes])
    if not counts.sum():
        return None
    drawn, [axes] = panels(1, 1, 3.2)
    colours = _colours(nodes, num_tiers(history))
    good = counts - np.array([node.lost for node in nodes])
    _draw_bars(axes, np.zeros(len(nodes)), good, colours, alpha=1.0)
    _draw_bars(axes, good, counts, colours, alpha=0.4)
    axes.axhline(counts.mean(), color=GREY, ls="--", lw=1.2)
    end, side = (1, counts.mean()), axes.get_yaxis_transform()
    offset: dict[str, Any] = {"xycoords": side, "textcoords": "offset points"}
    axes.annotate("even share", end, (4, 0), **offset, va="center", size=9)
    merges, asked = history.unit == "merge", "Rounds in which each node was asked to train"
    axes.set_ylabel("replies" if merges else "rounds")
    axes.set_title("Merged replies of each node" if merges else f"{asked} (pale: no good reply)")
    axes.set_ylim(0, 1.25 * counts.max())
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _name_nodes(axes, nodes, num_tiers(history), "upper right")
    return drawn


def _draw_bars(
    axes: Axes,
    bottom: NDArray[np.float64],
    top: NDArray[np.float64],
    colours: list[str],
    alpha: float,
) -> None:
    """Draw a bar per node, as one artist: fleets are large."""
    left, right = np.arange(len(bottom)) - 0.4, np.arange(len(bottom)) + 0.4
    corners = [(left, bottom), (left, top), (right, top), (right, bottom)]
    shapes = np.stack([np.column_stack(corner) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(list(shapes), facecolors=colours, alpha=alpha, lw=0))


def node_colours(nodes: list[NodeStats], count: int) -> dict[str, str]:
    """Return a colour for each node: that of its tier."""
    names = (node.identity for node in nodes)
    return dict(zip(names, _colours(nodes, count), strict=True))


def _colours(nodes: list[NodeStats], count: int) -> list[str]:
    colours, unknown = tier_colours(count), GREY if count else BLUE
    return [unknown if node.tier is None else colours[node.tier] for node in nodes]


def _name_nodes(
    axes: Axes, nodes: list[NodeStats], count: int, legend: Literal["upper left", "upper right"]
) -> None:
    """Name the nodes on the x axis, and show which colour is which of the tiers, if any."""
    axes.set_xlim(-0.7, len(nodes) - 0.3)
    axes.grid(visible=False, axis="x")
    if len(nodes) > MAX_NAMES:
        axes.set_xlabel(f"{len(nodes)} nodes, by tier and latency")
    else:
        names = [node.identity[:18] for node in nodes]
        tilted: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(nodes)), names, size=8.5, **(tilted if len(nodes) > 8 else {}))
    for tier, colour in enumerate(tier_colours(count)):
        axes.plot([], [], "s", color=colour, label=tier_name(tier, count))
    if count:
        axes.legend(loc=legend, ncols=min(count, 6), handletextpad=0.2, columnspacing=1.2)
