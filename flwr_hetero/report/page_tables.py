"""The tables of a run's page: tiers, failures, rounds."""

from collections.abc import Sequence

import numpy as np

from flwr_hetero.report.fleet_facts import TIFL, faults
from flwr_hetero.report.history import METRICS, History
from flwr_hetero.report.markup import Html, element, join, table
from flwr_hetero.report.page_parts import NOTHING, card
from flwr_hetero.report.style import tier_colours
from flwr_hetero.report.summary import tier_rows
from flwr_hetero.report.tier_plots import tier_name
from flwr_hetero.report.units import duration, figure, heading

MAX_ROWS = 500
"""Longest table on the page; the history has the rest."""
MAX_METRICS = 4
"""Metrics in the table of rounds."""


def tiers_part(history: History) -> Html:
    """Show a table of the tiers.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Html
        A box; nothing without tiers.
    """
    rows = tier_rows(history)
    if not rows:
        return NOTHING
    total = sum(row.rounds for row in rows) or 1
    colours = tier_colours(len(rows))
    lines = [
        (
            join([_chip(colours[row.tier]), tier_name(row.tier, len(rows))]),
            str(row.nodes),
            duration(row.latency_s),
            f"{row.rounds} ({100 * row.rounds / total:.0f} %)",
            duration(row.seconds),
            figure("accuracy", row.accuracy),
        )
        for row in rows
    ]
    head = ("tier", "nodes", "median latency", "rounds", "time of these rounds", "accuracy")
    return card("Tiers at a glance", table(head, lines, numeric=range(1, len(head))))


def faults_part(history: History) -> Html:
    """Show a table of the failures.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    Html
        A box; nothing without failures.
    """
    found = faults(history)
    if not found:
        return NOTHING
    lines = [
        (fault.node, fault.reason, str(len(fault.rounds)), _some(fault.rounds))
        for fault in found[:MAX_ROWS]
    ]
    rest = f" The {MAX_ROWS} most frequent of {len(found)}." if len(found) > MAX_ROWS else ""
    return card(
        "Failures",
        table(("node", "reason", "times", "rounds"), lines, numeric=[2]),
        element("p", f"Each cost that reply and nothing else.{rest}", class_="caption"),
    )


def rounds_part(history: History) -> Html:
    """Show a table of the rounds, folded up.

    Parameters
    ----------
    history : History
        A run with at least one round.

    Returns
    -------
    Html
        A box to unfold.
    """
    metrics = history.metrics(METRICS)[:MAX_METRICS]
    columns = [history.metric(name) for name in metrics]
    clock = history.column("virtual_s")
    seconds, tiers = np.diff(clock, prepend=0.0), history.column(TIFL, "tier")
    with_tiers = not np.isnan(tiers).all()
    lines = []
    for i, record in list(enumerate(history.rounds))[-MAX_ROWS:]:
        line = [str(record["round"]), duration(clock[i]), duration(seconds[i])]
        line += ["" if np.isnan(tiers[i]) else f"{tiers[i]:.0f}"] if with_tiers else []
        line += [str(len(record.get(key) or ())) for key in ("selected", "failures")]
        lines.append([*line, *map(figure, metrics, (column[i] for column in columns))])
    head = ["round", "time", "this round", *(["tier"] if with_tiers else []), "nodes", "failures"]
    head += [heading(name).lower() for name in metrics]
    count = len(history.rounds)
    shown = f"The last {MAX_ROWS} of {count} rounds" if count > MAX_ROWS else "All rounds"
    rounds = table(head, lines, numeric=range(len(head)))
    return element("details", element("summary", shown), rounds, class_="card")


def _chip(colour: str) -> Html:
    return element("span", class_="chip", style=f"background: {colour}")


def _some(rounds: Sequence[int], most: int = 12) -> str:
    once = list(dict.fromkeys(rounds))  # a round has training and evaluation
    shown = ", ".join(map(str, once[:most]))
    return f"{shown}, and {len(once) - most} more" if len(once) > most else shown
