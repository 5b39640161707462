"""Charts of one run beside its curves: tiers, times, nodes, merges. Figures are plotly's."""

from collections.abc import Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.report.curves import axes_of, column_of, rounded, spans
from flwr_hetero.report.history import FEDBUFF, TIFL, History, as_dict, as_numbers
from flwr_hetero.report.nodes import (
    NodeStats,
    busy_s,
    last_fairness,
    merged_replies,
    node_stats,
    num_tiers,
)
from flwr_hetero.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    is_share,
    on_nodes,
    tier_colours,
    time_unit,
)

MAX_NODES = 1000
"""Of a larger fleet every n-th node is drawn."""
MAX_NAMES = 40
"""Up to so many nodes are named on the axis."""
WIDE = 20
"""Values that differ more are on a logarithmic axis."""

Node = TypeVar("Node")
Floats = NDArray[np.float64]
Trace = dict[str, Any]
Panel = dict[str, Any]


def panels_of(history: History, clock: str) -> list[Panel]:
    """Return the charts for which a run has figures, in the order of the page."""
    axes, parts = axes_of([history], clock), spans(len(history.rounds))
    if not axes:
        return []
    ends = [part[-1] for part in parts]
    x = {axis.key: rounded(column_of(history, axis.key)[ends] / axis.scale) for axis in axes}
    over_time = [*_tiers(history, parts), *_times(history, parts), *_merges(history, parts)]
    for panel in over_time:
        panel["x"] = x
    return [p for p in (*over_time, *_nodes(history), *_replies(history), *_fairness(history)) if p]


def _panel(title: str, traces: list[Trace], caption: str = "", **layout: Any) -> Panel:
    return {"title": title, "traces": traces, "caption": caption, "layout": layout}


def _line(name: str, y: Floats, colour: str, **more: Any) -> Trace:
    look = {"color": colour, "width": 2} | more.pop("line", {})
    return {"name": name, "y": rounded(y), "mode": "lines", "line": look, **more}


def _means(values: Floats, parts: Sequence[NDArray[np.int64]]) -> Floats:
    """Average the known values of each span; NaN where there is none."""
    kept = [part[~np.isnan(values[part])] for part in parts]
    return np.array([values[part].mean() if len(part) else np.nan for part in kept])


# -- tiers and time --


def _tiers(history: History, parts: Any) -> list[Panel]:
    count = num_tiers(history)
    if count < 2:
        return []
    colours, ends = tier_colours(count), [part[-1] for part in parts]
    roles = {0: " (fastest)", count - 1: " (slowest)"}
    names = [f"tier {tier}{roles.get(tier, '')}" for tier in range(count)]
    drawn = history.column(TIFL, "tier")[ends]
    dots: list[Trace] = [
        {
            **{"name": name, "mode": "markers"},
            "y": rounded(np.where(drawn == tier, tier, np.nan)),
            "marker": {"color": colour, "symbol": "line-ns-open", "size": 18, "line": {"width": 2}},
        }
        for tier, (name, colour) in enumerate(zip(names, colours, strict=True))
    ]
    ticks = {"tickvals": list(range(count)), "ticktext": names}
    axis = ticks | {"range": [count - 0.4, -0.6], "showgrid": False, "zeroline": False}
    found = [_panel("Tier that trained", dots, yaxis=axis, showlegend=False)]
    for key, title, caption, yaxis in TIER_CHARTS:
        table = _by_tier(history, key, count)
        if np.isnan(table).all():
            continue
        columns = [_means(column, parts) for column in table.T]
        stacked = key == "tier_chances"
        more: Trace = {"stackgroup": "all"} if stacked else {}
        more |= {} if key == "tier_accuracy" else {"line": STEPS[stacked]}
        traces = [
            _line(name, np.nan_to_num(column) if stacked else column, colour, **more)
            for name, column, colour in zip(names, columns, colours, strict=True)
        ]
        found.append(_panel(title, traces, caption, yaxis=yaxis))
    return found


PERCENT = {"tickformat": ".4~p"}
STEPS = ({"shape": "hv"}, {"shape": "vh", "width": 0})
"""Lines of what a round leaves behind, and of what holds until its end."""
TIER_CHARTS = (
    ("tier_chances", "Chance of each tier", "By which the round's tier was drawn: credits and "
     "nodes that are there included.", PERCENT | {"range": [0, 1]}),
    ("credits", "Credits left", "", {"rangemode": "tozero"}),
    ("tier_accuracy", "Accuracy of each tier", "As last measured.", PERCENT),
)  # fmt: skip


def _by_tier(history: History, key: str, count: int) -> Floats:
    """Take a figure of each tier; before nodes are timed there is one tier, and nothing to tell."""
    rows = [as_dict(record.get(TIFL)).get(key) or () for record in history.rounds]
    known = [row[:count] if len(row) > 1 else () for row in rows]
    padded = [x for row in known for x in (*row, *[None] * (count - len(row)))]
    return as_numbers(padded).reshape(len(rows), count)


def _times(history: History, parts: Any) -> list[Panel]:
    clock, rounds = history.clock[1], history.column("round")
    ends = np.array([part[-1] for part in parts])
    if len(ends) < 2 or np.isnan(clock).all():
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.r_[np.nan, np.diff(clock[ends]) / np.diff(rounds[ends])]
    unit = time_unit(float(np.nanmax(seconds, initial=0.0)))
    count, tiers = num_tiers(history), history.column(TIFL, "tier")[ends]
    colours = [*tier_colours(count), GREY if count else BLUE]
    marks = [colours[int(tier)] if np.isfinite(tier) else colours[-1] for tier in tiers]
    dots: Trace = {"y": rounded(seconds / unit.seconds), "mode": "markers"}
    dots |= {"marker": {"color": marks, "size": 6}, "name": f"one {history.unit}"}
    caption = "Coloured by tier." if count else ""
    title = f"Time of each {history.unit}"
    yaxis = _positive(f"time ({unit.symbol})", seconds)
    found = [_panel(title, [dots], caption, yaxis=yaxis, showlegend=False)]
    actual = history.column(TIFL, "actual_s")
    if np.nansum(actual) > 0:
        unit = time_unit(float(np.nanmax(actual)))
        looks = (("actual_s", "actual", BLUE, "solid"), *ESTIMATES)
        traces = [
            _line(name, history.column(TIFL, key)[ends] / unit.seconds, colour, line={"dash": dash})
            for key, name, colour, dash in looks
        ]
        text = "Time of training up to each round, and what TiFL's estimates expected of it."
        title = f"total ({unit.symbol})"
        found.append(_panel("Estimated and actual time", traces, text, yaxis={"title": title}))
    total = [np.nancumsum(history.column(key))[ends] for key, *_ in TRAFFIC]
    if max(column[-1] for column in total):
        traces = [
            _line(name, column, colour, line={"dash": dash})
            for (_, name, colour, dash), column in zip(TRAFFIC, total, strict=True)
        ]
        text = "" if history.is_buffered else "Of training."
        found.append(_panel("Traffic", traces, text, yaxis={"ticksuffix": "B", "tickformat": "~s"}))
    return found


ESTIMATES = (
    ("exact_estimate_s", "expected slowest", GREEN, "dash"),
    ("paper_estimate_s", "TiFL's Eq. 6", ORANGE, "dot"),
)


TRAFFIC = (
    ("bytes_down", "to the nodes", BLUE, "solid"),
    ("bytes_up", "to the server", RED, "dash"),
)


def _positive(title: str, values: Floats) -> dict[str, Any]:
    """Start an axis at 0, or make it logarithmic where the values differ much."""
    known = values[np.isfinite(values) & (values > 0)]
    wide = len(known) > 0 and known.max() > WIDE * known.min()
    return {"title": title, **({"type": "log"} if wide else {"rangemode": "tozero"})}


# -- nodes --


def _some(nodes: list[Node]) -> list[Node]:
    """Take every n-th of a large fleet."""
    return nodes[:: max(1, -(-len(nodes) // MAX_NODES))]


def _nodes(history: History) -> list[Panel]:
    every = node_stats(history)
    nodes = _some(every)
    if not nodes:
        return []
    names = [escape(node.identity) for node in nodes]
    colours = _colours(nodes, num_tiers(history))
    axis: dict[str, Any] = {"type": "category", "title": "nodes, by tier and latency"}
    axis |= {} if len(nodes) <= MAX_NAMES else {"showticklabels": False}
    found = []
    typical = np.array([node.typical_s for node in nodes])
    if np.isfinite(typical).any():
        lows = np.array([n.latency_s.min() if len(n.latency_s) else np.nan for n in nodes])
        highs = np.array([n.latency_s.max() if len(n.latency_s) else np.nan for n in nodes])
        bars: Trace = {"type": "data", "symmetric": False, "width": 0, "thickness": 3}
        bars |= {"array": rounded(highs - typical), "arrayminus": rounded(typical - lows)}
        dots: Trace = {
            "x": names,
            "y": rounded(typical),
            "mode": "markers",
            "name": "median, range",
        }
        dots |= {"marker": {"color": colours, "size": 8}, "error_y": bars | {"color": GREY}}
        profiled = np.array([node.profiled_s for node in nodes])
        dashes: Trace = {"x": names, "y": rounded(profiled), "mode": "markers", "name": "profiled"}
        dashes |= {"marker": {"color": colours, "symbol": "line-ew-open", "size": 12}}
        traces = [dots, *([dashes] if np.isfinite(profiled).any() else [])]
        yaxis = _positive("latency (s)", np.r_[typical, lows, highs])
        found.append(_panel("Latency of the nodes", traces, xaxis=axis, yaxis=yaxis))
    asked, lost = (np.array([getattr(n, key) for n in nodes]) for key in ("selected", "lost"))
    if asked.any():
        good: Trace = {
            "type": "bar",
            "x": names,
            "y": (asked - lost).tolist(),
            "name": "replied well",
        }
        bad: Trace = {"type": "bar", "x": names, "y": lost.tolist(), "name": "no good reply"}
        good |= {"marker": {"color": colours}}
        bad |= {"marker": {"color": colours, "opacity": 0.4}}
        title = "updates" if history.is_buffered else f"{history.unit}s"
        layout = {"barmode": "stack", "xaxis": axis, "yaxis": {"title": title}}
        caption = "Pale: no good reply." if lost.any() else ""
        found.append(_panel("Who trained", [good, bad], caption, showlegend=False, **layout))
    return found


def _colours(nodes: Sequence[NodeStats], count: int) -> list[str]:
    colours, unknown = tier_colours(count), GREY if count else BLUE
    return [unknown if node.tier is None else colours[node.tier] for node in nodes]


def _fairness(history: History) -> list[Panel]:
    last = last_fairness(history)
    if last is None:
        return []
    nodes = {node.identity: node for node in node_stats(history)}
    names = list(dict.fromkeys([*(n for n in nodes if n in last.by_node), *last.by_node]))
    names = _some(names)
    count = num_tiers(history)
    known = [_colours([nodes[n]], count)[0] if n in nodes else GREY for n in names]
    values = [last.by_node[name] for name in names]
    dots: Trace = {"x": [escape(name) for name in names], "y": values, "mode": "markers"}
    dots |= {"marker": {"color": known, "size": 8}}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": last.mean, "y1": last.mean}
    shape = line | {"line": {"color": GREY, "dash": "dot", "width": 1.5}}
    share = PERCENT if is_share(last.metric) and 0 <= min(values) <= max(values) <= 1 else {}
    some = f"The {len(names)} worst of {last.nodes}. " if last.nodes > len(names) else ""
    caption = f"{some}As the nodes last measured it on data of their own; dotted: the mean."
    axis = {"type": "category", "showticklabels": len(names) <= MAX_NAMES}
    title = f"{on_nodes(last.metric)} on each node"
    layout = {"xaxis": axis, "yaxis": share, "shapes": [shape], "showlegend": False}
    return [_panel(title, [dots], caption, **layout)]


# -- runs without rounds --


def _merges(history: History, parts: Any) -> list[Panel]:
    """Draw staleness and age of the merged updates, and the nodes at work."""
    if not history.is_buffered:
        return []
    found = []
    for key, title, unit in (
        ("staleness", "Staleness", f"{history.update}s"),
        ("age_s", "Age of updates", "s"),
    ):
        rows = [_known(as_dict(record.get(FEDBUFF)).get(key)) for record in history.rounds]
        merged = [np.array([x for place in part for x in rows[place]]) for part in parts]
        low, middle, high = (
            np.array([np.percentile(values, q) if len(values) else np.nan for values in merged])
            for q in (0, 50, 100)
        )
        if np.isnan(middle).all():
            continue
        traces = [
            _line("lowest", low, BLUE, line={"width": 0}, hoverinfo="skip", showlegend=False),
            _line("range", high, BLUE, line={"width": 0}, fill="tonexty", fillcolor=f"{BLUE}33"),
            _line("median", middle, BLUE),
        ]
        yaxis = {"title": unit, "rangemode": "tozero"}
        text = f"By the {history.update}s since the node started." if key == "staleness" else ""
        found.append(_panel(title, traces, text, yaxis=yaxis))
    clock, ends = history.clock[1], [part[-1] for part in parts]
    total = np.cumsum(busy_s(history))
    with np.errstate(divide="ignore", invalid="ignore"):
        at_work = np.r_[np.nan, np.diff(total[ends]) / np.diff(clock[ends])]
    if np.isfinite(at_work).any():
        steps = _line("nodes at work", at_work, BLUE, line={"shape": "vh"})
        yaxis = {"title": "nodes", "rangemode": "tozero"}
        found.append(_panel("Nodes at work", [steps], yaxis=yaxis, showlegend=False))
    clipped = history.column(FEDBUFF, "clipped_share")
    if np.nansum(clipped) > 0:
        cut = _line("cut off", _means(clipped, parts), BLUE)
        title = "Weight cut off"
        found.append(_panel(title, [cut], yaxis=PERCENT | {"rangemode": "tozero"}))
    return found


def _known(values: Any) -> list[float]:
    return [value for value in values or () if value is not None]


def _replies(history: History) -> list[Panel]:
    """Draw a dot per node: how much slow nodes take part, and how stale they are."""
    replies = merged_replies(history)
    names = _some(list(replies))
    if not names:
        return []
    age = np.array([np.median(replies[name].age_s) for name in names])
    figures = {
        "Replies of each node": np.array([len(replies[name].age_s) for name in names], float),
        "Staleness of each node": np.array([np.mean(replies[name].staleness) for name in names]),
    }
    stats = {node.identity: node for node in node_stats(history)}
    count = num_tiers(history)
    colours = [_colours([stats[n]], count)[0] if n in stats else GREY for n in names]
    look: Trace = {"mode": "markers", "marker": {"color": colours, "size": 9, "opacity": 0.8}}
    dots = look | {"x": rounded(age), "text": [escape(name) for name in names]}
    layout: Trace = {"xaxis": _positive("median age of its updates (s)", age), "showlegend": False}
    return [
        _panel(title, [dots | {"y": rounded(y)}], yaxis={"rangemode": "tozero"}, **layout)
        for title, y in figures.items()
    ]
