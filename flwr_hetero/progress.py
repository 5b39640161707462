"""How far a run is: one line a round, in columns, and a bar below them on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MOST_NAMES = 2
"""Nodes that failed whose names are in the line."""


class Progress:
    """Make the line of each round or merge of a run.

    >>> progress = Progress(60)
    >>> record = {"round": 7, "virtual_s": 2.6, "selected": ["a", "b"], "failures": []}
    >>> progress.line(record | {"global": {"accuracy": 0.913}, "tifl": {"tier": 2}}, eta_s=95)
    'round  7/60  tier 2   2 nodes    2.60 s  accuracy  91.3 %  best  91.3 %  at    2.6 s  ETA 1:35'
    """

    def __init__(self, total: int, unit: str = "round") -> None:
        self.total, self.unit = total, unit
        self._best: dict[str, float] = {}
        self._clock_s, self._shown = 0.0, ""
        self._first: tuple[int, float] | None = None  # whose start-up is no measure for others

    def see(self, record: Mapping[str, Any]) -> None:
        """Learn when the round before the next one ended."""
        self._clock_s = float(record["virtual_s"])

    def line(self, record: Mapping[str, Any], eta_s: float | None = None) -> str:
        """Return a round's line; the time to the end is by the rounds since the first one."""
        number, clock_s, now_s = record["round"], float(record["virtual_s"]), time.monotonic()
        first, began_s = self._first = self._first or (number, now_s)
        if eta_s is None and number > first:
            eta_s = (now_s - began_s) / (number - first) * (self.total - number)
        parts = [
            f"{self.unit} {number:>{len(str(self.total))}}/{self.total}",
            *_who(record),
            f"{clock_s - self._clock_s:7.2f} s",
            *self._metric(record),
            f"at {clock_s:6.1f} s",
            f"ETA {'-' if eta_s is None else minutes(eta_s)}",
            *_failed(record),
        ]
        self.see(record)
        return "  ".join(parts)

    def _metric(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Name an accuracy, else a loss, of the server, else of nodes; and the best so far."""
        numbers = {
            name: float(value)
            for section in ("train", "evaluate", "global")
            for name, value in record.get(section, {}).items()
            if isinstance(value, (int, float))
        }
        for word, best in (("acc", max), ("loss", min)):
            names = [name for name in numbers if word in name.lower()]
            if names:
                name, value = names[-1], numbers[names[-1]]
                self._best[name] = best(value, self._best.get(name, value))
                best_so_far = _figure(name, self._best[name])
                self._shown = f"{name} {_figure(name, value)}  best {best_so_far}"
                yield self._shown
                return
        if self._shown:  # a round without an evaluation
            yield " " * len(self._shown)


def _who(record: Mapping[str, Any]) -> Iterator[str]:
    for part in record.values():
        if isinstance(part, dict) and "tier" in part:
            yield f"tier {'-' if part['tier'] is None else part['tier']}"
    yield f"{len(set(record.get('selected', ()))):>2} nodes"  # one may train several times


def _failed(record: Mapping[str, Any]) -> Iterator[str]:
    if names := list(dict.fromkeys(failure["node"] for failure in record.get("failures", ()))):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        yield f"failed: {', '.join(names[:MOST_NAMES])}{more}"


def _figure(name: str, value: float) -> str:
    share = "acc" in name.lower() and 0 <= value <= 1
    return f"{100 * value:5.1f} %" if share else f"{value:7.4g}"


def minutes(seconds: float) -> str:
    """Write a duration.

    >>> minutes(95), minutes(4000)
    ('1:35', '1:06:40')
    """
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text


@contextmanager
def bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar below the log if this is a terminal; give a function that says what is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    from flwr_hetero._flwr import console_handler

    before = console_handler.stream
    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)
        console_handler.setStream(sys.stderr)  # which now writes above the bar
        try:
            yield lambda done: shown.update(task, completed=done)
        finally:
            console_handler.setStream(before)
