"""Charts of one run beside its curves: tiers, times, nodes. Traces and layouts are plotly's."""

from html import escape
from typing import Any

import numpy as np

from flwr_hetero.report import style
from flwr_hetero.report.curves import axes_of, column_of, drawn_rounds, rounded
from flwr_hetero.report.history import PARTS, TIFL, Floats, History, Indices, as_dict, as_number
from flwr_hetero.report.nodes import message_parts, node_stats, num_tiers
from flwr_hetero.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, TIMES

# Of a larger fleet every n-th node is drawn.
MAX_NODES = 1000
# With more nodes their names would overlap on the axis.
MAX_NAMES = 40
# Nodes whose message times are drawn, half of them the fastest and half the slowest ones.
MAX_BARS = 20
PART_COLOURS = dict(zip(PARTS, (GREY, ORANGE, SKY, GREEN, PURPLE), strict=True))
PERCENT = {"tickformat": ".4~p"}
FROM_ZERO = {"rangemode": "tozero"}
# Key in TiFL's section, title, caption and y axis of the charts with a line per tier.
TIER_CHARTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("tier_chances", "Chance of each tier", "Considers credits and nodes online.", PERCENT),
    ("credits", "Credits left", "", FROM_ZERO),
    ("tier_accuracy", "Accuracy of each tier", "As last measured.", PERCENT),
)

Trace = dict[str, Any]
Panel = dict[str, Any]


def panels_of(history: History, clock: str) -> list[Panel]:
    """Return the charts for which a run has figures, in the order of the page."""
    axes = axes_of([history], clock)
    if not axes:
        return []
    places = drawn_rounds(len(history.rounds))
    x = {axis.key: rounded(column_of(history, axis.key)[places] / axis.scale) for axis in axes}
    over_time = [*_tiers(history, places), *_round_times(history, places)]
    return [*(panel | {"x": x} for panel in over_time), *_replies(history), *_messages(history)]


def _panel(title: str, traces: list[Trace], caption: str = "", **layout: Any) -> Panel:
    return {"title": title, "traces": traces, "caption": caption, "layout": layout}


# -- over time --


def _tiers(history: History, places: Indices) -> list[Panel]:
    count = num_tiers(history)
    if count < 2:
        return []
    names = [f"tier {tier}" for tier in range(count)]
    colours = style.tier_colours(count)
    trained = history.column(TIFL, "tier")[places]
    dash = {"symbol": "line-ns-open", "size": 18, "line": {"width": 2}}
    traces: list[Trace] = []
    for tier in range(count):
        y = rounded(np.where(trained == tier, tier, np.nan))
        marker = {"color": colours[tier], **dash}
        traces.append({"name": names[tier], "mode": "markers", "y": y, "marker": marker})
    ticks = {"tickvals": list(range(count)), "ticktext": names, "range": [count - 0.4, -0.6]}
    yaxis = {**ticks, "showgrid": False, "zeroline": False}
    caption = "Tier 0 is the fastest."
    panels = [_panel("Tier that trained", traces, caption, yaxis=yaxis, showlegend=False)]
    for key, title, caption, yaxis in TIER_CHARTS:
        values = _by_tier(history, key, count)[places]
        if np.isnan(values).all():
            continue
        traces = []
        for tier in range(count):
            line = {"y": rounded(values[:, tier]), "line": {"color": colours[tier]}}
            traces.append({"name": names[tier], "mode": "lines", **line})
        panels.append(_panel(title, traces, caption, yaxis=yaxis))
    return panels


def _by_tier(history: History, key: str, count: int) -> Floats:
    """Collect a figure of each tier and round: shape (rounds, tiers)."""
    table = np.full((len(history.rounds), count), np.nan)
    for place, record in enumerate(history.rounds):
        values = as_dict(record.get(TIFL)).get(key) or ()
        # Before nodes are timed there is one tier, which cannot be compared with others.
        if len(values) > 1:
            row = [as_number(value) for value in values[:count]]
            table[place, : len(row)] = row
    return table


def _round_times(history: History, places: Indices) -> list[Panel]:
    clock = history.clock[1]
    if len(places) < 2 or np.isnan(clock).all():
        return []
    # If some rounds are not drawn, a dot is the mean over the rounds since the one before.
    per_round = np.diff(clock[places]) / np.diff(history.column("round")[places])
    seconds = np.insert(per_round, 0, np.nan)
    unit = style.time_unit(float(np.nanmax(seconds, initial=0.0)))
    count = num_tiers(history)
    colours = style.tier_colours(count)
    no_tier = GREY if count else BLUE
    tiers = history.column(TIFL, "tier")[places]
    marks = [colours[int(tier)] if np.isfinite(tier) else no_tier for tier in tiers]
    dots = {"y": rounded(seconds / TIMES[unit]), "marker": {"color": marks, "size": 6}}
    dots |= {"name": f"one {history.unit}", "mode": "markers"}
    yaxis = {"title": f"time ({unit})", **FROM_ZERO}
    caption = "Coloured by tier." if count else ""
    return [_panel(f"Time of each {history.unit}", [dots], caption, yaxis=yaxis, showlegend=False)]


# -- by node --


def _bars(name: str, x: list[str], y: list[Any], marker: dict[str, Any]) -> Trace:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": marker}


def _replies(history: History) -> list[Panel]:
    nodes = node_stats(history)
    step = max(1, -(-len(nodes) // MAX_NODES))
    nodes = nodes[::step]
    if not any(node.selected for node in nodes):
        return []
    count = num_tiers(history)
    colours = style.tier_colours(count)
    no_tier = GREY if count else BLUE
    marks = [no_tier if node.tier is None else colours[node.tier] for node in nodes]
    names = [escape(node.identity) for node in nodes]
    lost = [node.lost for node in nodes]
    valid = [node.selected - node.lost for node in nodes]
    traces = [
        _bars("valid replies", names, valid, {"color": marks}),
        _bars("no valid reply", names, lost, {"color": marks, "opacity": 0.4}),
    ]
    xaxis = {"type": "category", "title": "nodes, by tier and latency"}
    layout: dict[str, Any] = {
        "barmode": "stack",
        "showlegend": False,
        "xaxis": {**xaxis, "showticklabels": len(nodes) <= MAX_NAMES},
        "yaxis": {"title": "updates" if history.is_buffered else f"{history.unit}s"},
    }
    caption = "Pale: no valid reply." if any(lost) else ""
    return [_panel("Replies of each node", traces, caption, **layout)]


def _messages(history: History) -> list[Panel]:
    nodes = list(message_parts(history).items())
    if not nodes:
        return []
    caption = "Medians. The table below explains the parts."
    if len(nodes) > MAX_BARS:
        half = MAX_BARS // 2
        nodes = [*nodes[:half], *nodes[-half:]]
        caption = f"The {half} fastest and the {half} slowest nodes. {caption}"
    names = [escape(name) for name, _ in nodes]
    table = np.array([seconds for _, seconds in nodes])
    unit = style.time_unit(float(np.nansum(table, axis=1).max()))
    traces = [
        _bars(part, names, rounded(seconds / TIMES[unit]), {"color": PART_COLOURS[part]})
        for part, seconds in zip(PARTS, table.T, strict=True)
        if not np.isnan(seconds).all()
    ]
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"type": "category", "title": "nodes, the fastest first"},
        "yaxis": {"title": f"time of a message ({unit})"},
    }
    return [_panel("What a message's time was spent on", traces, caption, **layout)]
