"""Charts of one run beside its curves: tiers, times, nodes. Figures are plotly's."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from flwr_hetero.report import style
from flwr_hetero.report.curves import axes_of, column_of, rounded, spans
from flwr_hetero.report.history import FEDBUFF, TIFL, UPDATE, Floats, History, as_dict, as_numbers
from flwr_hetero.report.nodes import NodeStats, busy_s, last_fairness, node_stats, num_tiers
from flwr_hetero.report.style import BLUE, GREEN, GREY, ORANGE, RED, SKY, TIMES

# Of a larger fleet every n-th node is drawn; up to so many are named on the axis.
MAX_NODES, MAX_NAMES = 1000, 40
# Values that differ more are on a logarithmic axis.
WIDE = 20
PERCENT, FROM_0 = {"tickformat": ".4~p"}, {"rangemode": "tozero"}
TRAFFIC = (
    ("bytes_down", "to the nodes", BLUE, "solid"),
    ("bytes_up", "to the server", RED, "dash"),
)
UPDATES = (("staleness", "Staleness", f"{UPDATE}s"), ("age_s", "Age of updates", "s"))
# Key, name, colour and dash of a line.
ESTIMATES = (
    ("actual_s", "actual", BLUE, "solid"),
    ("exact_estimate_s", "expected slowest", GREEN, "dash"),
    ("paper_estimate_s", "TiFL's Eq. 6", ORANGE, "dot"),
)

Trace = dict[str, Any]
Panel = dict[str, Any]


def panels_of(history: History, clock: str) -> list[Panel]:
    """Return the charts for which a run has figures, in the order of the page."""
    axes = axes_of([history], clock)
    if not axes:
        return []
    ends = [part[-1] for part in spans(len(history.rounds))]
    x = {axis.key: rounded(column_of(history, axis.key)[ends] / axis.scale) for axis in axes}
    over_time = [panel | {"x": x} for panel in (*_tiers(history, ends), *_times(history, ends))]
    return [*over_time, *_nodes(history), *_fairness(history)]


def _panel(title: str, traces: list[Trace], caption: str = "", **layout: Any) -> Panel:
    return {"title": title, "traces": traces, "caption": caption, "layout": layout}


def _line(name: str, y: Floats, colour: str, **look: Any) -> Trace:
    line = {"color": colour, "width": 2} | look
    return {"name": name, "y": rounded(y), "mode": "lines", "line": line}


def _dots(y: Floats, colours: str | list[str], look: Trace | None = None, **more: Any) -> Trace:
    marker = {"color": colours, "size": 8} | (look or {})
    return {"y": rounded(y), "mode": "markers", "marker": marker, **more}


def _axis(title: str, values: Floats) -> dict[str, Any]:
    """Start an axis at 0, or make it logarithmic where the values differ much."""
    known = values[np.isfinite(values) & (values > 0)]
    wide = len(known) > 0 and known.max() > WIDE * known.min()
    return {"title": title, **({"type": "log"} if wide else FROM_0)}


# -- over time --


def _tiers(history: History, ends: Sequence[int]) -> list[Panel]:
    if (count := num_tiers(history)) < 2:
        return []
    roles = {0: " (fastest)", count - 1: " (slowest)"}
    names = [f"tier {tier}{roles.get(tier, '')}" for tier in range(count)]
    looks = list(zip(names, style.tier_colours(count), strict=True))
    drawn = history.column(TIFL, "tier")[ends]
    dash = {"symbol": "line-ns-open", "size": 18, "line": {"width": 2}}
    dots = [
        _dots(np.where(drawn == tier, tier, np.nan), colour, dash, name=name)
        for tier, (name, colour) in enumerate(looks)
    ]
    axis = {"tickvals": list(range(count)), "ticktext": names, "range": [count - 0.4, -0.6]}
    axis |= {"showgrid": False, "zeroline": False}
    found = [_panel("Tier that trained", dots, yaxis=axis, showlegend=False)]
    for key, title, caption, yaxis, look in TIER_CHARTS:
        rows = [as_dict(history.rounds[end].get(TIFL)).get(key) or () for end in ends]
        # Before nodes are timed there is one tier, and nothing to tell.
        rows = [[*row, *[None] * count][:count] if len(row) > 1 else [None] * count for row in rows]
        table = as_numbers([x for row in rows for x in row]).reshape(-1, count)
        if np.isnan(table).all():
            continue
        if key == STACKED:  # a gap would shift the tiers above it
            table = np.nan_to_num(table)
        more = {"stackgroup": "all"} if key == STACKED else {}
        traces = [
            _line(name, column, colour, **look) | more
            for (name, colour), column in zip(looks, table.T, strict=True)
        ]
        found.append(_panel(title, traces, caption, yaxis=yaxis))
    return found


STACKED = "tier_chances"
# Key, title, caption, axis, look of the lines.
TIER_CHARTS: tuple[tuple[str, str, str, Trace, Trace], ...] = (
    (STACKED, "Chance of each tier", "By which the round's tier was drawn: credits and nodes that "
     "are there included.", PERCENT | {"range": [0, 1]}, {"shape": "vh", "width": 0}),
    ("credits", "Credits left", "", FROM_0, {"shape": "hv"}),
    ("tier_accuracy", "Accuracy of each tier", "As last measured.", PERCENT, {}),
)  # fmt: skip


def _times(history: History, ends: Sequence[int]) -> list[Panel]:
    def slope(total: Floats, per: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            each: Floats = np.diff(total[ends]) / np.diff(per[ends])
        return np.insert(each, 0, np.nan)

    clock = history.clock[1]
    if len(ends) < 2 or np.isnan(clock).all():
        return []
    seconds = slope(clock, history.column("round"))
    unit = style.time_unit(float(np.nanmax(seconds, initial=0.0)))
    count, tiers = num_tiers(history), history.column(TIFL, "tier")[ends]
    colours = [*style.tier_colours(count), GREY if count else BLUE]
    marks = [colours[int(tier)] if np.isfinite(tier) else colours[-1] for tier in tiers]
    dots = _dots(seconds / TIMES[unit], marks, {"size": 6}, name=f"one {history.unit}")
    yaxis, title = _axis(f"time ({unit})", seconds), f"Time of each {history.unit}"
    caption = "Coloured by tier." if count else ""
    found = [_panel(title, [dots], caption, yaxis=yaxis, showlegend=False)]
    if np.nansum(actual := history.column(TIFL, "actual_s")) > 0:
        unit = style.time_unit(float(np.nanmax(actual)))
        traces = [
            _line(name, history.column(TIFL, key)[ends] / TIMES[unit], colour, dash=dash)
            for key, name, colour, dash in ESTIMATES
        ]
        text = "Time of training up to each round, and what TiFL's estimates expected of it."
        yaxis = {"title": f"total ({unit})"}
        found.append(_panel("Estimated and actual time", traces, text, yaxis=yaxis))
    totals = [np.nancumsum(history.column(key))[ends] for key, *_ in TRAFFIC]
    if max(total[-1] for total in totals):
        traces = [
            _line(name, total, colour, dash=dash)
            for (_, name, colour, dash), total in zip(TRAFFIC, totals, strict=True)
        ]
        text = "" if history.is_buffered else "Of training."
        found.append(_panel("Traffic", traces, text, yaxis={"ticksuffix": "B", "tickformat": "~s"}))
    for key, title, unit in UPDATES:
        if (FEDBUFF, key) in history.table:
            low, middle, high = history.table[FEDBUFF, key][ends].T
            traces = [_line("lowest", low, SKY), _line("median", middle, BLUE)]
            yaxis = {"title": unit} | FROM_0
            found.append(_panel(title, [*traces, _line("highest", high, SKY)], yaxis=yaxis))
    in_flight = slope(np.cumsum(busy_s(history)), clock)
    if history.is_buffered and np.isfinite(in_flight).any():
        steps = _line("nodes in flight", in_flight, BLUE, shape="vh")
        yaxis = {"title": "nodes"} | FROM_0
        found.append(_panel("Nodes in flight", [steps], yaxis=yaxis, showlegend=False))
    return found


# -- by node --


def _nodes(history: History) -> list[Panel]:
    nodes = node_stats(history)
    nodes = nodes[:: max(1, -(-len(nodes) // MAX_NODES))]
    names, colours = [escape(node.identity) for node in nodes], _colours(history, nodes)
    axis: dict[str, Any] = {"type": "category", "title": "nodes, by tier and latency"}
    axis |= {} if len(nodes) <= MAX_NAMES else {"showticklabels": False}
    found = []
    typical, profiled = (
        np.array([getattr(n, k) for n in nodes]) for k in ("typical_s", "profiled_s")
    )
    if np.isfinite(typical).any():
        lows, highs = (
            np.array([edge(n.latency_s) if len(n.latency_s) else np.nan for n in nodes])
            for edge in (np.min, np.max)
        )
        bars: Trace = {"type": "data", "symmetric": False, "width": 0, "thickness": 3}
        bars |= {"array": rounded(highs - typical), "arrayminus": rounded(typical - lows)}
        traces = [_dots(typical, colours, x=names, name="median, range")]
        traces[0]["error_y"] = bars | {"color": GREY}
        if np.isfinite(profiled).any():
            dash = {"symbol": "line-ew-open", "size": 12}
            traces.append(_dots(profiled, colours, dash, x=names, name="profiled"))
        yaxis = _axis("latency (s)", np.r_[typical, lows, highs])
        found.append(_panel("Latency of the nodes", traces, xaxis=axis, yaxis=yaxis))
    asked, lost = (np.array([getattr(n, key) for n in nodes]) for key in ("selected", "lost"))
    if asked.any():
        parts = (("replied well", asked - lost, 1.0), ("no good reply", lost, 0.4))
        traces = [
            {"type": "bar", "x": names, "y": counts.tolist(), "name": name}
            | {"marker": {"color": colours, "opacity": opacity}}
            for name, counts, opacity in parts
        ]
        title = "updates" if history.is_buffered else f"{history.unit}s"
        layout = {"barmode": "stack", "xaxis": axis, "yaxis": {"title": title}}
        caption = "Pale: no good reply." if lost.any() else ""
        found.append(_panel("Who trained", traces, caption, showlegend=False, **layout))
    return found


def _fairness(history: History) -> list[Panel]:
    if (last := last_fairness(history)) is None:
        return []
    stats = {node.identity: node for node in node_stats(history)}
    names = list(dict.fromkeys([*(n for n in stats if n in last.by_node), *last.by_node]))
    names = names[:: max(1, -(-len(names) // MAX_NODES))]
    values = np.array([last.by_node[name] for name in names])
    colours = _colours(history, [stats.get(name) for name in names])
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": last.mean, "y1": last.mean}
    line |= {"line": {"color": GREY, "dash": "dot", "width": 1.5}}
    share = (
        PERCENT if style.is_share(last.metric) and 0 <= values.min() <= values.max() <= 1 else {}
    )
    some = f"The {len(names)} worst of {last.nodes}. " if last.nodes > len(names) else ""
    caption = f"{some}As the nodes last measured it on data of their own; dotted: the mean."
    axis = {"type": "category", "showticklabels": len(names) <= MAX_NAMES}
    layout = {"xaxis": axis, "yaxis": share, "shapes": [line], "showlegend": False}
    dots = _dots(values, colours, x=[escape(name) for name in names])
    return [_panel(f"{style.on_nodes(last.metric)} on each node", [dots], caption, **layout)]


def _colours(history: History, nodes: Sequence[NodeStats | None]) -> list[str]:
    count = num_tiers(history)
    colours, unknown = style.tier_colours(count), GREY if count else BLUE
    return [unknown if n is None or n.tier is None else colours[n.tier] for n in nodes]
