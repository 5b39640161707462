"""Tables of one run or several: tiers, nodes, fairness, failures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import PARTS, TIFL, History, as_dict, as_number
from flwr_hetero.report.nodes import (
    failure_groups,
    last_fairness,
    message_parts,
    node_stats,
    num_tiers,
)
from flwr_hetero.report.style import duration, figure, heading

# Longest table on a page: the history has the rest.
MAX_ROWS = 1000

# A text, and the number to sort by.
Cell = tuple[str, float | None]


class Table(NamedTuple):
    """A table that readers can sort and filter; ``folded`` until it is opened."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    folded: bool = False

    def data(self) -> dict[str, Any]:
        """Return what the page needs."""
        left_out = len(self.rows) - MAX_ROWS
        more = f" The first {MAX_ROWS} of {len(self.rows)} rows." if left_out > 0 else ""
        return self._asdict() | {"rows": self.rows[:MAX_ROWS], "caption": self.caption + more}


def text(value: object) -> Cell:
    """Make a cell that is sorted by its text."""
    return str(value), None


def number(value: float | None, shown: str = "") -> Cell:
    """Make a cell that is sorted by its number; an empty one if there is none."""
    if value is None or not np.isfinite(value):
        return "", None
    return shown or f"{value:.10g}", float(value)


def seconds(value: float) -> Cell:
    """Make a cell of a time."""
    return number(value, duration(value))


def tables_of(runs: Sequence[tuple[str, int | None, History]]) -> list[Table]:
    """Return the tables for which runs have figures; each run has a label and a seed."""
    # A single run is not named in its rows.
    found, start = [], 0 if len(runs) > 1 else 2
    for title, names, caption, rows_of in TABLES:
        head = ["run", "seed", *names]
        rows = [[text(name), number(seed), *row] for name, seed, h in runs for row in rows_of(h)]
        used = [i for i in range(start, len(head)) if any(row[i][0] for row in rows)]
        rows = [[row[i] for i in used] for row in rows]
        found += [Table(title, [head[i] for i in used], rows, caption)] if rows else []
    return found


def _tiers(history: History) -> Iterator[list[Cell]]:
    nodes, drawn = node_stats(history), history.column(TIFL, "tier")
    levels = as_dict(history.rounds[-1].get(TIFL)).get("tier_accuracy") or []
    for tier in range(num_tiers(history)):
        times = [node.typical_s for node in nodes if node.tier == tier]
        known = [time for time in times if np.isfinite(time)]
        latency = seconds(float(np.median(known)) if known else np.nan)
        level = as_number(levels[tier]) if tier < len(levels) else np.nan
        cells = number(tier), number(len(times)), latency, number(int((drawn == tier).sum()))
        yield [*cells, number(level, figure("accuracy", level))]


def _nodes(history: History) -> Iterator[list[Cell]]:
    fair = last_fairness(history)
    for node in node_stats(history):
        quality = fair.by_node.get(node.identity, np.nan) if fair else np.nan
        known = text(node.identity), number(node.tier), seconds(node.typical_s)
        level = number(quality, figure(fair.metric if fair else "", quality))
        yield [*known, number(node.selected), number(node.lost), level]


def _seconds(history: History) -> Iterator[list[Cell]]:
    for name, parts in message_parts(history).items():
        cells = [seconds(float(part_s)) for part_s in (np.nansum(parts), *parts)]
        yield [text(name), *cells]


def _fairness(history: History) -> Iterator[list[Cell]]:
    if fair := last_fairness(history):
        levels = [number(level, figure(fair.metric, level)) for level in (fair.worst, fair.mean)]
        yield [text(heading(fair.metric)), *levels, number(fair.nodes), number(fair.round)]


def _failures(history: History) -> Iterator[list[Cell]]:
    for node, reason, rounds in failure_groups(history):
        times = [number(value) for value in (len(rounds), rounds[0], rounds[-1])]
        yield [text(node), text(reason), *times]


# Title, head, caption, and what makes the rows of a run.
TABLES = (
    ("Tiers", ("tier", "nodes", "median latency", "rounds", "accuracy"),
     "Tier 0 holds the fastest nodes.", _tiers),
    ("Nodes", ("node", "tier", "median latency", "asked", "lost", "quality"),
     "Asked: how often it was selected. Lost: replies that did not count. Quality: the model's "
     "on the node's own data, as last measured.", _nodes),
    ("Seconds of a message", ("node", "total", *PARTS),
     "Medians. Start: from the start of a process to the call of the ClientApp. Receive and send: "
     "the SuperNode's. Train: the ClientApp's. Wait: all that is not measured, such as polling.",
     _seconds),
    ("Fairness", ("metric", "worst tenth of the nodes", "mean", "nodes", "as of"),
     "As last measured by the nodes.", _fairness),
    ("Failures", ("node", "reason", "times", "first in", "last in"),
     "Each cost that reply and nothing else.", _failures),
)  # fmt: skip


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return a row per setting."""
    rows = [[text(key), text(setting_text(value))] for key, value in settings.items()]
    return Table(title, ("setting", "value"), rows, folded=True)


def setting_text(value: Any) -> str:
    """Write the value of a setting as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value in (None, "") else str(value)
