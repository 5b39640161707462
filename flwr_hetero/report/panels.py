"""Charts of one run beside its curves: tiers, times, nodes. Figures are plotly's."""

from html import escape
from typing import Any

import numpy as np

from flwr_hetero.report import style
from flwr_hetero.report.curves import axes_of, column_of, drawn_rounds, rounded
from flwr_hetero.report.history import PARTS, TIFL, Floats, History, Indices, as_dict, as_number
from flwr_hetero.report.nodes import message_parts, node_stats, num_tiers
from flwr_hetero.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, TIMES

# Of a larger fleet every n-th node is drawn; up to so many are named on the axis.
MAX_NODES, MAX_NAMES = 1000, 40
# Of the seconds of a message so many nodes are drawn, half of them the quickest ones.
MAX_BARS = 20
PART_COLOURS = dict(zip(PARTS, (GREY, ORANGE, SKY, GREEN, PURPLE), strict=True))
PERCENT, FROM_0 = {"tickformat": ".4~p"}, {"rangemode": "tozero"}

Trace = dict[str, Any]
Panel = dict[str, Any]


def panels_of(history: History, clock: str) -> list[Panel]:
    """Return the charts for which a run has figures, in the order of the page."""
    axes = axes_of([history], clock)
    if not axes:
        return []
    places = drawn_rounds(len(history.rounds))
    x = {axis.key: rounded(column_of(history, axis.key)[places] / axis.scale) for axis in axes}
    over_time = [*_tiers(history, places), *_times(history, places)]
    return [*(panel | {"x": x} for panel in over_time), *_nodes(history), *_seconds(history)]


def _panel(title: str, traces: list[Trace], caption: str = "", **layout: Any) -> Panel:
    return {"title": title, "traces": traces, "caption": caption, "layout": layout}


def _dots(y: Floats, colours: str | list[str], look: Trace | None = None, **more: Any) -> Trace:
    marker = {"color": colours, "size": 8} | (look or {})
    return {"y": rounded(y), "mode": "markers", "marker": marker, **more}


# -- over time --

# Key in TiFL's part of a line, title, caption, axis.
TIER_CHARTS: tuple[tuple[str, str, str, Trace], ...] = (
    ("tier_chances", "Chance of each tier", "By which the round's tier was drawn: credits and "
     "nodes that are online included.", PERCENT),
    ("credits", "Credits left", "", FROM_0),
    ("tier_accuracy", "Accuracy of each tier", "As last measured.", PERCENT),
)  # fmt: skip


def _tiers(history: History, places: Indices) -> list[Panel]:
    if (count := num_tiers(history)) < 2:
        return []
    names = [f"tier {tier}" for tier in range(count)]
    looks = list(zip(names, style.tier_colours(count), strict=True))
    drawn = history.column(TIFL, "tier")[places]
    dash = {"symbol": "line-ns-open", "size": 18, "line": {"width": 2}}
    dots = [
        _dots(np.where(drawn == tier, tier, np.nan), colour, dash, name=name)
        for tier, (name, colour) in enumerate(looks)
    ]
    axis = {"tickvals": list(range(count)), "ticktext": names, "range": [count - 0.4, -0.6]}
    axis |= {"showgrid": False, "zeroline": False}
    text = "Tier 0 is the fastest."
    found = [_panel("Tier that trained", dots, text, yaxis=axis, showlegend=False)]
    for key, title, caption, yaxis in TIER_CHARTS:
        table = _by_tier(history, key, count)[places]
        traces: list[Trace] = [
            {"name": name, "y": rounded(column), "mode": "lines", "line": {"color": colour}}
            for (name, colour), column in zip(looks, table.T, strict=True)
        ]
        if not np.isnan(table).all():
            found.append(_panel(title, traces, caption, yaxis=yaxis))
    return found


def _by_tier(history: History, key: str, count: int) -> Floats:
    """Collect a figure of each tier and round: shape (rounds, tiers)."""
    table = np.full((len(history.rounds), count), np.nan)
    for place, record in enumerate(history.rounds):
        row = as_dict(record.get(TIFL)).get(key) or ()
        # Before nodes are timed there is one tier, and nothing to compare.
        for tier, value in enumerate(row[:count] if len(row) > 1 else ()):
            table[place, tier] = as_number(value)
    return table


def _times(history: History, places: Indices) -> list[Panel]:
    clock = history.clock[1]
    if len(places) < 2 or np.isnan(clock).all():
        return []
    # Of rounds that are not all drawn it is the mean since the one drawn before.
    per_round = np.diff(clock[places]) / np.diff(history.column("round")[places])
    seconds = np.insert(per_round, 0, np.nan)
    unit = style.time_unit(float(np.nanmax(seconds, initial=0.0)))
    count, tiers = num_tiers(history), history.column(TIFL, "tier")[places]
    colours = [*style.tier_colours(count), GREY if count else BLUE]
    marks = [colours[int(tier)] if np.isfinite(tier) else colours[-1] for tier in tiers]
    dots = _dots(seconds / TIMES[unit], marks, {"size": 6}, name=f"one {history.unit}")
    yaxis = {"title": f"time ({unit})"} | FROM_0
    caption = "Coloured by tier." if count else ""
    return [_panel(f"Time of each {history.unit}", [dots], caption, yaxis=yaxis, showlegend=False)]


# -- by node --


def _nodes(history: History) -> list[Panel]:
    nodes = node_stats(history)
    nodes = nodes[:: max(1, -(-len(nodes) // MAX_NODES))]
    asked, lost = (np.array([getattr(n, key) for n in nodes]) for key in ("selected", "lost"))
    if not asked.any():
        return []
    colours = style.tier_colours(count := num_tiers(history))
    unknown = GREY if count else BLUE
    marks = [unknown if node.tier is None else colours[node.tier] for node in nodes]
    names = [escape(node.identity) for node in nodes]
    parts = (("valid replies", asked - lost, 1.0), ("no valid reply", lost, 0.4))
    traces = [
        {"type": "bar", "x": names, "y": counts.tolist(), "name": name}
        | {"marker": {"color": marks, "opacity": opacity}}
        for name, counts, opacity in parts
    ]
    axis: Trace = {"type": "category", "title": "nodes, by tier and latency"}
    axis |= {"showticklabels": len(nodes) <= MAX_NAMES}
    title = "updates" if history.is_buffered else f"{history.unit}s"
    layout = {"barmode": "stack", "xaxis": axis, "yaxis": {"title": title}}
    caption = "Pale: no valid reply." if lost.any() else ""
    return [_panel("Replies of each node", traces, caption, showlegend=False, **layout)]


def _seconds(history: History) -> list[Panel]:
    nodes = [*message_parts(history).items()]
    if not nodes:
        return []
    caption = "Medians; the table says what the parts are."
    if len(nodes) > MAX_BARS:
        nodes = [*nodes[: MAX_BARS // 2], *nodes[-MAX_BARS // 2 :]]
        caption = f"The {MAX_BARS // 2} quickest and the {MAX_BARS // 2} slowest nodes. {caption}"
    unit = style.time_unit(max(float(np.nansum(own)) for _, own in nodes))
    names, table = [escape(name) for name, _ in nodes], np.array([own for _, own in nodes])
    traces = [
        {"type": "bar", "x": names, "y": rounded(column / TIMES[unit]), "name": part}
        | {"marker": {"color": PART_COLOURS[part]}}
        for part, column in zip(PARTS, table.T, strict=True)
        if not np.isnan(column).all()
    ]
    layout: Trace = {"barmode": "stack", "yaxis": {"title": f"time of a message ({unit})"}}
    layout |= {"xaxis": {"type": "category", "title": "nodes, the quickest first"}}
    return [_panel("Where the seconds of a message went", traces, caption, **layout)]
