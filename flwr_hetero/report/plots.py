"""The plots of a run: what there is to draw, and the drawing of it."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from flwr_hetero.report.history import History
from flwr_hetero.report.plots_merges import draw_fairness, draw_merges
from flwr_hetero.report.plots_nodes import draw_latency, draw_selection, draw_tiers
from flwr_hetero.report.plots_rounds import (
    MAX_PANELS,
    draw_against_traffic,
    draw_main_metric,
    draw_other_metrics,
    draw_round_times,
    draw_wrapper,
    fans,
    other_metrics,
    wrappers_of,
)
from flwr_hetero.report.style import Theme, png


class Plot(NamedTuple):
    """One figure of the report."""

    name: str
    heading: str
    caption: str
    draw: Callable[[History], Figure | None]


PLOTS = (
    Plot(
        "progress",
        "Progress",
        "The filled dot is the last value, the ring the best. The fleet's clock is the time that "
        "the nodes need; emulated devices make it virtual.",
        draw_main_metric,
    ),
    Plot(
        "metrics",
        "Other metrics",
        "As the nodes and the server reported them.",
        draw_other_metrics,
    ),
    Plot(
        "tiers",
        "Tiers",
        "Tier 0 holds the fastest nodes. Probabilities and credits are those after the round.",
        draw_tiers,
    ),
    Plot(
        "time",
        "Time and traffic",
        "A round takes as long as the slowest node that was asked. With tiers, the colour is that "
        "of the round's tier.",
        draw_round_times,
    ),
    Plot(
        "traffic",
        "Quality against traffic",
        "Bytes of training, down and up, with all that wrappers add to them.",
        draw_against_traffic,
    ),
    Plot(
        "latency",
        "Latency of the nodes",
        "From the instruction to the reply, as each node reports it; nodes by tier, then latency.",
        draw_latency,
    ),
    Plot("selection", "Who trained", "Nodes by tier, then latency.", draw_selection),
    Plot(
        "merges",
        "Merges",
        "An update is stale by the merges made since its node started, and as old as the node "
        "took. Spans of a long run are drawn together.",
        draw_merges,
    ),
    Plot(
        "fairness",
        "The model on each node",
        "As the nodes measured it on data of their own, those that were asked; dashed: the mean.",
        draw_fairness,
    ),
)


def plots_of(history: History) -> list[Plot]:
    """Return the plots for a history: the fixed ones, then one per wrapper with figures."""
    few = history.thinned
    captions = {"metrics": PLOTS[1].caption + _rest(len(other_metrics(few)))}
    if few is not history:
        span = f" Of this long run, spans of {len(history.rounds) / len(few.rounds):.0f} "
        span += f"{history.unit}s are drawn as one."
        captions["progress"] = PLOTS[0].caption + span
    if history.unit == "merge":
        captions["time"] = "From one merge to the next. Bytes include those of evaluation."
    plots = [plot._replace(caption=captions.get(plot.name, plot.caption)) for plot in PLOTS]
    for section in wrappers_of(history):
        name = "wrapper-" + re.sub(r"[^\w-]+", "-", section)
        caption = f"Figures of this wrapper, {history.unit} by {history.unit}."
        caption += _rest(len(fans(history, section)))
        plots.append(Plot(name, section, caption, partial(draw_wrapper, section=section)))
    return plots


def render(plot: Plot, history: History, theme: Theme) -> bytes | None:
    """Draw a plot."""
    if not history.rounds:
        return None
    with theme.applied():
        drawn = plot.draw(history)
        return None if drawn is None else png(drawn)


def _rest(count: int) -> str:
    """Caption for the panels that a figure leaves out."""
    left_out = f" The first {MAX_PANELS} of {count} are shown; history.jsonl has them all."
    return left_out if count > MAX_PANELS else ""
