"""How well and how fast: metrics, time of each round, traffic."""

from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flwr_hetero.report.history import (
    CLOCKS,
    METRICS,
    TIFL,
    History,
    NodeFacts,
    best_round,
    lower_is_better,
    node_facts,
    num_tiers,
    of_tiers,
)
from flwr_hetero.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    PERCENT,
    RED,
    WIDTH,
    figure,
    heading,
    metric_axis,
    panels,
    positive_axis,
    round_axis,
    run_look,
    size,
    tier_colours,
    time_unit,
    zoom,
)

MAX_PANELS = 12
"""Panels of a figure; a caption says how many more there would be."""


def draw_main_metric(history: History) -> Figure | None:
    """Draw the main metric against time and against rounds."""
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
    """Draw the main metric and the loss against the bytes that training has taken."""
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
    """Draw every metric but the main one against rounds, a small panel each."""
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
    """Return the metrics beside the main one."""
    others = [name for name in history.metrics(METRICS) if name != history.main_metric()]
    return [name for name in others if np.nansum(np.abs(history.metric(name)))]


def draw_round_times(history: History) -> Figure | None:
    """Draw how long each round took, estimates of the total, and the traffic."""
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
    """Return the fleet's clock, or the server's where the history has no other."""
    return history.column(clock_key(history))


def clock_key(history: History) -> str:
    """Tell which clock :func:`clock_of` returns."""
    return "virtual_s" if np.nansum(history.column("virtual_s")) > 0 else "wall_s"


def small_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Make a figure of small panels, at most three in a row."""
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


HEIGHTS = {"tier": 1.9, "tier_probs": 1.5, "credits": 1.5, "tier_accuracy": 1.9}
"""Inches of each panel."""


def draw_tiers(history: History) -> Figure | None:
    """Draw the tier of each round and, below it, what its choice depends on."""
    count = num_tiers(history)
    if count < 2:
        return None
    books = {key: _over_rounds(history, key, count) for key in HEIGHTS if key != "tier"}
    shown = ["tier", *(key for key, values in books.items() if not np.isnan(values).all())]
    heights = [HEIGHTS[key] for key in shown]
    drawn = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    axes = drawn.subplots(
        len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    ).ravel()
    _draw_choice(axes[0], history, count)
    draw = {
        "tier_probs": _draw_probs,
        "credits": _draw_credits,
        "tier_accuracy": _draw_accuracy,
    }
    rounds = np.append(history.column("round"), history.last_round + 0.5)
    for axis, key in zip(axes[1:], shown[1:], strict=True):
        draw[key](axis, rounds, books[key])
    axes[0].set_xlim(rounds[0], rounds[-1])
    round_axis(axes[-1])
    return drawn


def draw_legend(
    axes: Axes, count: int, location: Literal["upper left", "upper right"] = "upper left"
) -> None:
    """Say which colour is which tier."""
    for tier, colour in enumerate(tier_colours(count)):
        axes.plot([], [], "s", color=colour, label=tier_name(tier, count))
    axes.legend(loc=location, ncols=min(count, 6), handletextpad=0.2, columnspacing=1.2)


def tier_name(tier: int, count: int) -> str:
    """Return a tier's name for people."""
    role = {0: " (fastest)", count - 1: " (slowest)"}.get(tier, "") if count > 1 else ""
    return f"tier {tier}{role}"


def _draw_choice(axes: Axes, history: History, count: int) -> None:
    tiers, rounds = history.column(TIFL, "tier"), history.column("round")
    total = max(int(np.isfinite(tiers).sum()), 1)
    for tier, colour in enumerate(tier_colours(count)):
        when = rounds[tiers == tier]
        axes.vlines(when, tier - 0.38, tier + 0.38, color=colour, lw=_bar_width(len(rounds)))
        axes.text(
            1.01,
            tier,
            f"{len(when)} round{'s' * (len(when) != 1)}, {100 * len(when) / total:.0f} %",
            transform=axes.get_yaxis_transform(),
            va="center",
            size=9,
        )
    axes.set_yticks(range(count), [tier_name(tier, count) for tier in range(count)])
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(visible=False)
    axes.set_title("Tier that trained in each round")


def _draw_probs(axes: Axes, rounds: NDArray[np.float64], probs: NDArray[np.float64]) -> None:
    steps: dict[str, Any] = {"step": "post"}  # passed on to fill_between
    axes.stackplot(
        rounds,
        np.nan_to_num(probs).T,
        colors=tier_colours(probs.shape[1]),
        alpha=0.85,
        lw=0,
        **steps,
    )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(visible=False)
    axes.set_ylabel("chance")
    axes.set_title("Chance of each tier (fastest at the bottom)")


def _draw_credits(axes: Axes, rounds: NDArray[np.float64], credit: NDArray[np.float64]) -> None:
    for column, colour in zip(credit.T, tier_colours(credit.shape[1]), strict=True):
        axes.step(rounds, column, where="post", color=colour)
    axes.set_ylim(bottom=-0.04 * np.nanmax(credit))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("rounds left")
    axes.set_title("Credits of each tier")


def _draw_accuracy(axes: Axes, rounds: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    for column, colour in zip(values.T, tier_colours(values.shape[1]), strict=True):
        axes.step(rounds, column, where="post", color=colour)
    metric_axis(axes, "accuracy", values.ravel())
    axes.set_title("Accuracy of each tier, as last measured")


def _over_rounds(history: History, key: str, count: int) -> NDArray[np.float64]:
    """Return a figure of each tier after each round; the last row stands twice, to end steps."""
    table = np.full((len(history.rounds), count), np.nan)
    for row, record in zip(table, history.rounds, strict=True):
        values = of_tiers(record, key)
        row[: len(values)] = values
    return np.vstack([table, table[-1:]])


def _bar_width(num_rounds: int) -> float:
    """Points that fill most of a round's share of the panel."""
    return float(np.clip(0.8 * 72 * 0.75 * WIDTH / max(num_rounds, 1), 0.8, 9))


MAX_NAMES = 40
"""Up to so many nodes are named on the axis."""


NO_TIER = "#8c8c8c"


def draw_latency(history: History) -> Figure | None:
    """Draw each node's latencies, ordered and coloured by tier."""
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
    """Draw how often each node was asked to train, and how often in vain."""
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


MAX_LINES = 6
"""Longer lists are drawn as median and range."""


ROOM = 0.15
"""Height of a line of a legend, as a part of the panel, so that it covers no curve."""


class Fan(NamedTuple):
    """A key of a wrapper over the rounds: one number a round, or several."""

    key: str
    rounds: NDArray[np.float64]
    labels: list[str]
    values: NDArray[np.float64]

    @property
    def is_wide(self) -> bool:
        """Whether a line for each number would be too many."""
        return len(self.labels) > MAX_LINES


def wrappers_of(history: History) -> list[str]:
    """Return the sections of a history that have something to draw here."""
    own = (*METRICS, TIFL)
    return [name for name in history.sections() if name not in own and fans(history, name)]


def fans(history: History, section: str) -> list[Fan]:
    """Collect the numeric figures of a wrapper."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for record in history.rounds:
        for key, value in (record.get(section) or {}).items():
            if numbers := _numbers(value):
                found.setdefault(key, {})[record["round"]] = numbers
    return [_fan(key, rows) for key, rows in found.items()]


def draw_wrapper(history: History, section: str) -> Figure | None:
    """Draw the figures of a wrapper against rounds, a small panel each."""
    if not (shown := fans(history, section)[:MAX_PANELS]):
        return None
    drawn, axes = small_panels(len(shown))
    for axis, fan in zip(axes, shown, strict=True):
        _draw_fan(axis, fan)
        axis.set_title(heading(fan.key) + (" (median, range)" if fan.is_wide else ""))
        round_axis(axis)
    return drawn


def _draw_fan(axes: Axes, fan: Fan) -> None:
    marker = "o" if len(fan.rounds) <= 30 else ""
    if fan.is_wide:
        low, middle, high = np.nanpercentile(fan.values, (0, 50, 100), axis=1)
        axes.fill_between(fan.rounds, low, high, color=BLUE, alpha=0.2, lw=0)
        axes.plot(fan.rounds, middle, color=BLUE, marker=marker, markersize=3)
        return
    for number, (label, column) in enumerate(zip(fan.labels, fan.values.T, strict=True)):
        look = run_look(number)
        axes.plot(fan.rounds, column, **look, marker=marker, markersize=3, label=label)
    if len(fan.labels) > 1:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + ROOM * (top - bottom) * -(-len(fan.labels) // 2))
        axes.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1)


def _fan(key: str, rows: dict[int, dict[str, float]]) -> Fan:
    labels = list(dict.fromkeys(label for row in rows.values() for label in row))
    nan = float("nan")
    values = np.array([[row.get(label, nan) for label in labels] for row in rows.values()])
    return Fan(key, np.array(list(rows), np.float64), labels, values)


def _numbers(fact: Any) -> dict[str, float]:
    """Return the numbers in a fact; none if it holds anything else."""
    if isinstance(fact, list):
        fact = {str(position): item for position, item in enumerate(fact)}
    items = fact if isinstance(fact, dict) else {"": fact}
    known = {label: item for label, item in items.items() if item is not None}
    if not all(isinstance(item, int | float) for item in known.values()):
        return {}
    return {label: float(item) for label, item in known.items()}
