"""Tables of one run or several: tiers, nodes, fairness, failures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import PARTS, TIFL, History, as_dict, as_number
from flwr_hetero.report.nodes import failure_groups, last_fairness, message_parts, node_stats
from flwr_hetero.report.style import duration, figure

# A page shows no more rows of a table; the history has the rest.
MAX_ROWS = 1000

# A text, and the number to sort by; None to sort by the text.
Cell = tuple[str, float | None]
# What the rows of a table are made from: a number or a text shown as it is, or a finished cell.
Value = str | float | Cell | None
Rows = Iterable[Sequence[Value]]


class Table(NamedTuple):
    """A table that readers can sort and filter; a ``folded`` one is shown on demand."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    folded: bool = False

    def data(self) -> dict[str, Any]:
        """Return what the page shows of the table."""
        caption = self.caption
        if len(self.rows) > MAX_ROWS:
            caption += f" The first {MAX_ROWS} of {len(self.rows)} rows."
        return self._asdict() | {"rows": self.rows[:MAX_ROWS], "caption": caption}


def cells(rows: Rows) -> list[list[Cell]]:
    """Make the cells of a table; None and numbers that are not finite make empty cells."""
    return [[_cell(value) for value in row] for row in rows]


def _cell(value: Value) -> Cell:
    if isinstance(value, tuple):
        return value
    if isinstance(value, str):
        return value, None
    return number(value, "" if value is None else f"{value:.10g}")


def number(value: float | None, shown: str) -> Cell:
    """Make a cell that shows a text and is sorted by a number; empty without a finite number."""
    if value is None or not np.isfinite(value):
        return "", None
    return shown, float(value)


def seconds(value: float) -> Cell:
    """Make a cell of a time."""
    return number(value, duration(value))


def metric_value(metric: str, value: float) -> Cell:
    """Make a cell of a metric's value."""
    return number(value, figure(metric, value))


def tables_of(runs: Sequence[tuple[str, int | None, History]]) -> list[Table]:
    """Return the tables for which runs have figures; each run has a label and a seed."""
    tables = []
    for title, names, caption, rows_of in TABLES:
        head = ["run", "seed", *names]
        rows = cells([label, seed, *row] for label, seed, run in runs for row in rows_of(run))
        # Leave out empty columns. A single run is not named in its rows.
        first = 0 if len(runs) > 1 else 2
        used = [place for place in range(first, len(head)) if any(row[place][0] for row in rows)]
        if rows:
            rows = [[row[place] for place in used] for row in rows]
            tables.append(Table(title, [head[place] for place in used], rows, caption))
    return tables


def _tiers(history: History) -> Rows:
    nodes = node_stats(history)
    trained = history.column(TIFL, "tier")
    accuracies = as_dict(history.rounds[-1].get(TIFL)).get("tier_accuracy") or []
    tiers = {node.tier for node in nodes if node.tier is not None}
    for tier in sorted(tiers | {*trained[~np.isnan(trained)].astype(int).tolist()}):
        times = [node.typical_s for node in nodes if node.tier == tier]
        latency = median([time for time in times if np.isfinite(time)] or [np.nan])
        rounds = int((trained == tier).sum())
        accuracy = as_number(accuracies[tier]) if tier < len(accuracies) else np.nan
        yield [tier, len(times), seconds(latency), rounds, metric_value("accuracy", accuracy)]


def _nodes(history: History) -> Rows:
    fairness = last_fairness(history)
    metric = fairness.metric if fairness else ""
    by_node = fairness.by_node if fairness else {}
    for node in node_stats(history):
        latency = seconds(node.typical_s)
        quality = metric_value(metric, by_node.get(node.identity, np.nan))
        yield [node.identity, node.tier, latency, node.selected, node.lost, quality]


def _seconds(history: History) -> Rows:
    for name, parts in message_parts(history).items():
        yield [name, seconds(np.nansum(parts)), *map(seconds, parts)]


def _failures(history: History) -> Rows:
    for node, reason, rounds in failure_groups(history):
        yield [node, reason, len(rounds), rounds[0], rounds[-1]]


# Title, column heads, caption, and a function that yields the rows of a run.
TABLES: tuple[tuple[str, tuple[str, ...], str, Callable[[History], Rows]], ...] = (
    ("Tiers", ("tier", "nodes", "median latency", "rounds", "accuracy"),
     "Tier 0 has the fastest nodes.", _tiers),
    ("Nodes", ("node", "tier", "median latency", "selected", "lost", "last on its own data"),
     "Selected: how often the node was asked to train. Lost: how often the server could not use "
     "its reply.", _nodes),
    ("Time of a message", ("node", "total", *PARTS),
     "Medians. Start: from the start of a process to the call of the ClientApp. Receive and send: "
     "transfers by the SuperNode. Train: the ClientApp. Wait: the rest, such as polling.",
     _seconds),
    ("Failures", ("node", "reason", "times", "first in", "last in"),
     "Each failure lost this reply and nothing else.", _failures),
)  # fmt: skip


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return a folded table with a row per setting."""
    rows = cells([key, setting_text(value)] for key, value in settings.items())
    return Table(title, ("setting", "value"), rows, folded=True)


def setting_text(value: Any) -> str:
    """Write the value of a setting as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value in (None, "") else str(value)
