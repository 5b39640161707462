"""Tables of one run or several: tiers, nodes, fairness, failures, rounds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import METRICS, TIFL, History, as_dict, as_numbers
from flwr_hetero.report.nodes import failure_groups, last_fairness, node_stats, num_tiers
from flwr_hetero.report.style import duration, figure, heading, on_nodes

# Longest table on a page, metrics in the table of rounds, round numbers in a row of failures: the
# history has the rest.
MAX_ROWS, MAX_METRICS, MAX_NUMBERS = 1000, 4, 12

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


class Named(NamedTuple):
    """A run in a table: its label and seed stand before each of its rows."""

    label: str
    seed: int | None
    history: History


def text(value: object) -> Cell:
    """Make a cell that is sorted by its text."""
    return str(value), None


def number(value: float | None, shown: str = "") -> Cell:
    """Make a cell that is sorted by its number; an empty one if there is none."""
    if value is None or not np.isfinite(value):
        return "", None
    return shown or f"{value:.10g}", float(value)


def tables_of(runs: Sequence[Named]) -> list[Table]:
    """Return the tables for which runs have figures; a single run is not named in its rows."""
    found, start = [], 0 if len(runs) > 1 else 2
    for title, names, caption, rows_of in TABLES:
        head = ["run", "seed", *names]
        rows = [[text(r.label), number(r.seed), *row] for r in runs for row in rows_of(r.history)]
        used = [i for i in range(start, len(head)) if any(row[i][0] for row in rows)]
        rows = [[row[i] for i in used] for row in rows]
        found += [Table(title, [head[i] for i in used], rows, caption)] if rows else []
    return found


def _tiers(history: History) -> Iterator[list[Cell]]:
    nodes, drawn = node_stats(history), history.column(TIFL, "tier")
    seconds = np.diff(history.clock[1], prepend=np.nan)
    info = as_dict(history.rounds[-1].get(TIFL))
    accuracy = dict(enumerate(as_numbers(info.get("tier_accuracy") or [])))
    for tier in range(num_tiers(history)):
        latency = [n.typical_s for n in nodes if n.tier == tier and np.isfinite(n.typical_s)]
        typical = float(np.median(latency)) if latency else np.nan
        count, spent = int((drawn == tier).sum()), float(np.nansum(seconds[drawn == tier]))
        share = count / max(int(np.isfinite(drawn).sum()), 1)
        level = accuracy.get(tier, np.nan)
        yield [
            number(tier),
            number(sum(node.tier == tier for node in nodes)),
            number(typical, duration(typical)),
            number(count),
            number(share, f"{100 * share:.0f} %"),
            number(spent, duration(spent)),
            number(level, figure("accuracy", level)),
        ]


def _nodes(history: History) -> Iterator[list[Cell]]:
    fair = last_fairness(history)
    for node in node_stats(history):
        quality = fair.by_node.get(node.identity, np.nan) if fair else np.nan
        yield [
            text(node.identity),
            number(node.tier),
            number(node.typical_s, duration(node.typical_s)),
            number(node.selected),
            number(node.lost),
            number(node.staleness, f"{node.staleness:.1f}"),
            number(quality, figure(fair.metric if fair else "", quality)),
        ]


def _fairness(history: History) -> Iterator[list[Cell]]:
    if fair := last_fairness(history):
        levels = [number(level, figure(fair.metric, level)) for level in (fair.worst, fair.mean)]
        yield [text(on_nodes(fair.metric)), *levels, number(fair.nodes), number(fair.round)]


def _failures(history: History) -> Iterator[list[Cell]]:
    for node, reason, rounds in failure_groups(history):
        once = list(dict.fromkeys(rounds))  # a round has training and evaluation
        more = f", and {len(once) - MAX_NUMBERS} more" if len(once) > MAX_NUMBERS else ""
        shown = ", ".join(map(str, once[:MAX_NUMBERS])) + more
        yield [text(node), text(reason), number(len(rounds)), (shown, once[0])]


# Title, head, caption, and what makes the rows of a run.
TABLES = (
    ("Tiers", ("tier", "nodes", "median latency", "rounds", "share of rounds",
               "time of these rounds", "accuracy"),
     "Tier 0 holds the fastest nodes.", _tiers),
    ("Nodes", ("node", "tier", "median latency", "asked", "lost", "mean staleness", "quality"),
     "Asked: how often it was selected. Lost: replies that did not count. Quality: the model's "
     "on the node's own data, as last measured.", _nodes),
    ("Fairness", ("metric", "worst tenth of the nodes", "mean", "nodes", "as of"),
     "As last measured by the nodes.", _fairness),
    ("Failures", ("node", "reason", "times", "in"),
     "Each cost that reply and nothing else.", _failures),
)  # fmt: skip


def rounds_table(history: History) -> Table:
    """Return a row per round, the latest first."""
    metrics = history.metrics(METRICS)[:MAX_METRICS]
    levels = [(name, history.metric(name)) for name in metrics]
    clock, tiers = history.clock[1], history.column(TIFL, "tier")
    seconds, has_tiers = np.diff(clock, prepend=0.0), not np.isnan(tiers).all()
    unit, count = history.unit, len(history.rounds)
    rows = []
    for place in range(count - 1, -1, -1)[:MAX_ROWS]:
        record = history.rounds[place]
        row = [number(record["round"])]
        row += [number(column[place], duration(column[place])) for column in (clock, seconds)]
        row += [number(tiers[place])] if has_tiers else []
        row += [number(len(set(record.get("selected") or ())))]
        row += [number(len(record.get("failures") or ()))]
        row += [number(column[place], figure(name, column[place])) for name, column in levels]
        rows.append(row)
    head = [unit, "time", f"this {unit}", *(["tier"] if has_tiers else []), "nodes", "failures"]
    head += [heading(name).lower() for name in metrics]
    caption = f"The last {MAX_ROWS} of {count}." if count > MAX_ROWS else ""
    return Table(f"{unit.capitalize()}s", head, rows, caption, folded=True)


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return a row per setting."""
    rows = [[text(key), text(setting_text(value))] for key, value in settings.items()]
    return Table(title, ("setting", "value"), rows, folded=True)


def setting_text(value: Any) -> str:
    """Write the value of a setting as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value in (None, "") else str(value)
