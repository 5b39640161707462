"""Charts of one run beside its curves: tiers and times of rounds, as traces of plotly."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flwr_hetero.report import style
from flwr_hetero.report.curves import axes_of, column_of, drawn_rounds, rounded
from flwr_hetero.report.history import TIFL, Floats, History, Indices, as_dict, as_number
from flwr_hetero.report.nodes import num_tiers
from flwr_hetero.report.style import BLUE, GREY, TIMES

PERCENT = {"tickformat": ".4~p"}
FROM_ZERO = {"rangemode": "tozero"}
# Key in TiFL's section, title, caption and y axis of the charts with a line per tier.
TIER_CHARTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("tier_chances", "Chance of each tier", "Considers credits and nodes online.", PERCENT),
    ("credits", "Credits left", "", FROM_ZERO),
    ("tier_accuracy", "Accuracy of each tier", "As last measured.", PERCENT),
)

Panel = dict[str, Any]


def panels_of(history: History, clock: str) -> list[Panel]:
    """Return the charts for which a run has figures, in the order of the page."""
    axes = axes_of([history], clock)
    if not axes:
        return []
    places = drawn_rounds(len(history.rounds))
    x = {axis.key: rounded(column_of(history, axis.key)[places] / axis.scale) for axis in axes}
    panels = (*_tiers(history, places), *_round_times(history, places))
    return [panel | {"x": x} for panel in panels]


def _tiers(history: History, places: Indices) -> Iterator[Panel]:
    count = num_tiers(history)
    if count < 2:
        return
    names = [f"tier {tier}" for tier in range(count)]
    colours = style.tier_colours(count)
    trained = history.column(TIFL, "tier")[places]
    dash = {"symbol": "line-ns-open", "size": 18, "line": {"width": 2}}
    traces: list[dict[str, Any]] = []
    for tier in range(count):
        y = rounded(np.where(trained == tier, tier, np.nan))
        marker = {"color": colours[tier], **dash}
        traces.append({"name": names[tier], "mode": "markers", "y": y, "marker": marker})
    ticks = {"tickvals": list(range(count)), "ticktext": names, "range": [count - 0.4, -0.6]}
    yaxis = {**ticks, "showgrid": False, "zeroline": False}
    caption = "Tier 0 is the fastest."
    yield {"title": "Tier that trained", "traces": traces, "caption": caption, "yaxis": yaxis}
    for key, title, caption, yaxis in TIER_CHARTS:
        values = _by_tier(history, key, count)[places]
        if np.isnan(values).all():
            continue
        traces = []
        for tier in range(count):
            line = {"y": rounded(values[:, tier]), "line": {"color": colours[tier]}}
            traces.append({"name": names[tier], "mode": "lines", **line})
        yield {"title": title, "traces": traces, "caption": caption, "yaxis": yaxis}


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


def _round_times(history: History, places: Indices) -> Iterator[Panel]:
    clock = history.clock[1]
    if len(places) < 2 or np.isnan(clock).all():
        return
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
    yield {
        "title": f"Time of each {history.unit}",
        "traces": [dots],
        "caption": "Coloured by tier." if count else "",
        "yaxis": {"title": {"text": f"time ({unit})"}, **FROM_ZERO},
    }
