"""Tables of a run: tiers, nodes, failures, settings."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import TIFL, History, as_dict, as_number
from flwr_hetero.report.nodes import failure_groups, last_fairness, node_stats
from flwr_hetero.report.style import UNKNOWN, duration, figure

# A page shows no more rows of a table; the history has the rest.
MAX_ROWS = 1000


class Table(NamedTuple):
    """A table of texts; a ``folded`` one is shown on demand."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    folded: bool


def make_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    caption: str = "",
    *,
    folded: bool = False,
) -> Table:
    """Make a table without the columns that hold nothing; None is an empty cell."""
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    used = [
        place for place in range(len(head)) if any(row[place] not in ("", UNKNOWN) for row in texts)
    ]
    if len(texts) > MAX_ROWS:
        caption += f" The first {MAX_ROWS} of {len(texts)} rows."
    shown = [[row[place] for place in used] for row in texts[:MAX_ROWS]]
    return Table(title, [head[place] for place in used], shown, caption, folded)


def tables_of(history: History) -> list[Table]:
    """Return the tables for which a run has figures."""
    failures = [
        [node, reason, len(rounds), rounds[0], rounds[-1]]
        for node, reason, rounds in failure_groups(history)
    ]
    tables = [
        make_table(
            "Tiers",
            ("tier", "nodes", "median latency", "rounds", "accuracy"),
            _tiers(history),
            "Tier 0 has the fastest nodes.",
        ),
        make_table(
            "Nodes",
            ("node", "tier", "median latency", "selected", "lost", "last on its own data"),
            _nodes(history),
            "Selected: how often the node was asked to train. Lost: how often the server could "
            "not use its reply.",
        ),
        make_table(
            "Failures",
            ("node", "reason", "times", "first in", "last in"),
            failures,
            "Each failure lost this reply and nothing else.",
        ),
    ]
    return [table for table in tables if table.rows]


def _tiers(history: History) -> Iterable[Sequence[object]]:
    nodes = node_stats(history)
    trained = history.column(TIFL, "tier")
    accuracies = as_dict(history.rounds[-1].get(TIFL)).get("tier_accuracy") or []
    tiers = {node.tier for node in nodes if node.tier is not None}
    for tier in sorted(tiers | {*trained[~np.isnan(trained)].astype(int).tolist()}):
        times = [node.typical_s for node in nodes if node.tier == tier]
        latency = median([time for time in times if np.isfinite(time)] or [np.nan])
        accuracy = as_number(accuracies[tier]) if tier < len(accuracies) else np.nan
        rounds = int((trained == tier).sum())
        yield tier, len(times), duration(latency), rounds, figure("accuracy", accuracy)


def _nodes(history: History) -> Iterable[Sequence[object]]:
    fairness = last_fairness(history)
    metric = fairness.metric if fairness else ""
    by_node = fairness.by_node if fairness else {}
    for node in node_stats(history):
        latency = duration(node.typical_s)
        quality = figure(metric, by_node.get(node.identity, np.nan))
        yield node.identity, node.tier, latency, node.selected, node.lost, quality


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return a folded table with a row per setting."""
    rows = [(key, setting_text(value)) for key, value in settings.items()]
    return make_table(title, ("setting", "value"), rows, folded=True)


def setting_text(value: Any) -> str:
    """Write the value of a setting as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value in (None, "") else str(value)
