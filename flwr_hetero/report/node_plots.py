"""Nodes: latency by tier, and how often each trained."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flwr_hetero.report.fleet_facts import NodeFacts, node_facts, num_tiers
from flwr_hetero.report.history import History
from flwr_hetero.report.style import BLUE, WIDTH, panels, positive_axis, tier_colours
from flwr_hetero.report.tier_plots import draw_legend

MAX_NAMES = 40
"""Up to so many nodes are named on the axis."""
NO_TIER = "#8c8c8c"


def draw_latency(history: History) -> Figure | None:
    """Draw each node's latencies, ordered and coloured by tier.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if no latency is known.
    """
    nodes = [node for node in node_facts(history) if np.isfinite(node.typical_s)]
    if not nodes:
        return None
    drawn, [axes] = panels(1, 1, 3.6)
    place, colours = np.arange(len(nodes)), np.array(_colours(nodes, history))
    seen = np.array([bool(len(node.latency_s)) for node in nodes])
    low, high = (
        np.array([f(node.latency_s) for node in nodes if len(node.latency_s)])
        for f in (np.min, np.max)
    )
    typical, profiled = (
        np.array([getattr(node, name) for node in nodes]) for name in ("typical_s", "profiled_s")
    )
    room = 0.9 * 72 * WIDTH / len(nodes)  # points per node
    axes.vlines(place[seen], low, high, color=colours[seen], lw=min(3, room), alpha=0.35)
    axes.scatter(place[seen], typical[seen], s=min(5, room) ** 2, c=colours[seen], zorder=3)
    axes.scatter(place, profiled, s=min(11, room) ** 2, c=colours, marker="_", lw=1.8, zorder=3)
    known = np.concatenate([typical, profiled, low, high])
    positive_axis(axes, known)
    axes.set_ylabel("latency (s)")
    axes.set_title("Latency of each node: median (dot), range (bar), profiled (dash)")
    _name_nodes(axes, nodes)
    if num_tiers(history):
        draw_legend(axes, num_tiers(history))
    return drawn


def draw_selection(history: History) -> Figure | None:
    """Draw how often each node was asked to train, and how often in vain.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if nobody was asked.
    """
    nodes = node_facts(history)
    counts = np.array([node.selected for node in nodes])
    if not counts.sum():
        return None
    drawn, [axes] = panels(1, 1, 3.2)
    colours = _colours(nodes, history)
    good = counts - np.array([node.in_vain for node in nodes])
    _draw_bars(axes, np.zeros(len(nodes)), good, colours, alpha=1.0)
    _draw_bars(axes, good, counts, colours, alpha=0.4)
    axes.axhline(counts.mean(), color=NO_TIER, ls="--", lw=1.2)
    axes.annotate(
        "even share",
        (1, counts.mean()),
        (4, 0),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        va="center",
        size=9,
    )
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("rounds")
    axes.set_title("Rounds in which each node was asked to train (pale: no good reply)")
    axes.set_ylim(0, 1.25 * counts.max())
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _name_nodes(axes, nodes)
    if num_tiers(history):
        draw_legend(axes, num_tiers(history), "upper right")
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


def _colours(nodes: list[NodeFacts], history: History) -> list[str]:
    count = num_tiers(history)
    colours = tier_colours(count)
    unknown = NO_TIER if count else BLUE
    return [unknown if node.tier is None else colours[node.tier] for node in nodes]


def _name_nodes(axes: Axes, nodes: list[NodeFacts]) -> None:
    axes.set_xlim(-0.7, len(nodes) - 0.3)
    if len(nodes) <= MAX_NAMES:
        tilt = 0 if len(nodes) <= 8 else 60
        names = [node.identity[:18] for node in nodes]
        axes.set_xticks(
            range(len(nodes)),
            names,
            rotation=tilt,
            ha="right" if tilt else "center",
            size=8.5,
            rotation_mode="anchor" if tilt else "default",
        )
    else:
        axes.set_xlabel(f"{len(nodes)} nodes, by tier and latency")
    axes.grid(visible=False, axis="x")
