"""Tiers: which one trained when, their chances, credits and accuracy."""

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flwr_hetero.report.fleet_facts import TIFL, num_tiers, of_tiers
from flwr_hetero.report.history import History
from flwr_hetero.report.style import PERCENT, WIDTH, metric_axis, round_axis, tier_colours

HEIGHTS = {"tier": 1.9, "tier_probs": 1.5, "credits": 1.5, "tier_accuracy": 1.9}
"""Inches of each panel."""


def draw_tiers(history: History) -> Figure | None:
    """Draw the tier of each round and, below it, what its choice depends on.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Figure or None
        None if the run has fewer than two tiers.
    """
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
    """Say which colour is which tier.

    Parameters
    ----------
    axes : Axes
        A panel.
    count : int
        Number of tiers.
    location : {"upper left", "upper right"}
        Corner of the panel.
    """
    for tier, colour in enumerate(tier_colours(count)):
        axes.plot([], [], "s", color=colour, label=tier_name(tier, count))
    axes.legend(loc=location, ncols=min(count, 6), handletextpad=0.2, columnspacing=1.2)


def tier_name(tier: int, count: int) -> str:
    """Return a tier's name for people.

    Parameters
    ----------
    tier : int
        0 is the fastest.
    count : int
        Number of tiers.

    Returns
    -------
    str
        The outermost two say what they are.

    Examples
    --------
    >>> [tier_name(tier, 3) for tier in range(3)]
    ['tier 0 (fastest)', 'tier 1', 'tier 2 (slowest)']
    """
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
