"""The history of a run: the files of its directory, its rounds, and the time to a target."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import compress
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import check_choice, check_number, invalid
from flwr_hetero.report.lines import parse

_Result = TypeVar("_Result")

CONFIG = "config.json"
HISTORY = "history.jsonl"
MODEL = "model.safetensors"
REPORT = "report.html"
CHECKPOINT = "checkpoint"
LOCK = ".lock"

TIFL = "tifl"
"""Section of the history that holds tiers."""
FEDBUFF = "fedbuff"
"""Section of a run without rounds: who was merged, how stale and how old."""
FEDSLICE = "fedslice"
"""Section of a run whose lines are rounds of several updates of the model."""
FAIRNESS = "fairness"
"""Section of how good the model is on each node."""
EVALUATED = "evaluated-round"
"""No metric: the merge whose model the nodes evaluated, which went on meanwhile."""
METRICS = ("global", "evaluate", "train")
"""Where metrics are looked up, in this order: central evaluation first."""
CLOCKS = {
    "virtual_s": "time on the fleet's clock",
    "wall_s": "time on the server's clock",
    "round": "rounds",
}
"""Clock in the history to its name on pages."""


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the settings of a run; entries of other types than a run writes are left out."""
    try:
        config = json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    types = {"settings": dict, "versions": dict, "resumed": list}
    known = as_dict(config).items()
    return {key: value for key, value in known if isinstance(value, types.get(key, object))}


@dataclass(frozen=True)
class History:
    """The rounds of a run.

    Parameters
    ----------
    rounds : tuple of dict
        One record per round, in order; round 0 is the state before training.
    notes : tuple of str
        Lines that could not be read.

    Examples
    --------
    >>> history = History(({"round": 0, "global": {"accuracy": 0.1}}, {"round": 1}))
    >>> history.metric("accuracy").tolist()
    [0.1, nan]
    """

    rounds: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was computed of the rounds, which do not change."""

    @property
    def last_round(self) -> int:
        """Number of the last round; -1 if there is none."""
        return int(self.rounds[-1]["round"]) if self.rounds else -1

    @cached_property
    def is_buffered(self) -> bool:
        """Whether no node waits for others: updates are merged as they come."""
        return any(FEDBUFF in record for record in self.rounds)

    @cached_property
    def unit(self) -> str:
        """What a record is of: a round, or a merge of a run without rounds."""
        is_in_rounds = any(FEDSLICE in record for record in self.rounds)
        return "merge" if self.is_buffered and not is_in_rounds else "round"

    @property
    def update(self) -> str:
        """What a change of the model is called where no node waits."""
        return "merge" if self.unit == "merge" else "server update"

    @property
    def clock(self) -> tuple[str, NDArray[np.float64]]:
        """The fleet's clock by its key, or the server's where there is no other."""
        name = "virtual_s" if np.nansum(self.column("virtual_s")) > 0 else "wall_s"
        return name, self.column(name)

    def column(self, *path: str) -> NDArray[np.float64]:
        """Collect one number per round by its keys, such as ``"tifl", "tier"``; NaN where none."""
        if path not in self._known:
            values: list[Any] = list(self.rounds)
            for key in path:
                values = [as_dict(value).get(key) for value in values]
            self._known[path] = as_numbers(values)
            self._known[path].flags.writeable = False
        return cast(NDArray[np.float64], self._known[path])

    @cached_property
    def _sections(self) -> dict[str, list[str]]:
        """Keys of all dicts in the rounds, and the numbers in each."""
        found: dict[str, dict[str, None]] = {}
        for record in self.rounds:
            for section, figures in record.items():
                if isinstance(figures, dict):
                    known = found.setdefault(section, {})
                    if new := figures.keys() - known:
                        ordered = [key for key in figures if key in new]
                        numbers = as_numbers([figures[key] for key in ordered])
                        known |= dict.fromkeys(compress(ordered, np.isfinite(numbers).tolist()))
        return {section: list(known) for section, known in found.items()}

    def wrapper_sections(self) -> list[str]:
        """Return the keys under which rounds keep figures of the wrappers, TiFL's among them."""
        return [key for key in self._sections if key not in (*METRICS, "latency", "weights")]

    def metrics(self, sections: tuple[str, ...] | None = None) -> list[str]:
        """Return the names that :meth:`metric` knows, of some sections or all.

        Metrics have bare names; wrappers' figures, and names that are taken, ``section/key``.
        """
        names: dict[str, None] = {}
        for section in (*METRICS, *self.wrapper_sections()) if sections is None else sections:
            for key in self._sections.get(section, ()):
                if key == EVALUATED:
                    continue
                is_free = section in METRICS and key not in names
                names[key if is_free else f"{section}/{key}"] = None
        return list(names)

    def metric(self, name: str) -> NDArray[np.float64]:
        """Collect a metric per round, by bare name or ``section/key``; NaN where a round has none.

        Raises
        ------
        ValueError
            If no round has it.
        """
        section, slash, key = name.partition("/")
        if slash and not np.isnan(values := self.column(section, key)).all():
            return values
        for section in METRICS:
            if not np.isnan(values := self.column(section, name)).all():
                return values
        known = ", ".join(self.metrics()) or "none at all"
        raise invalid("metric", name, f"be in the history, which has {known}")

    def main_metric(self) -> str | None:
        """Return the metric to judge the run by: an accuracy, else a loss, else any."""
        names = self.metrics(METRICS)
        for word in ("acc", "loss", ""):
            for name in names:
                if word in name.lower():
                    return name
        return None


def once(compute: Callable[[History], _Result]) -> Callable[[History], _Result]:
    """Let a function compute something of a history once, for the rounds do not change."""

    @wraps(compute)
    def known(history: History) -> _Result:
        if compute not in history._known:
            history._known[compute] = compute(history)
        return cast(_Result, history._known[compute])

    return known


def read_history(directory: str | Path) -> History:
    """Read the history of a run directory; a line that is no round is left out and noted.

    Where a round occurs twice, the later line counts.

    Raises
    ------
    ValueError
        If there is no such directory, or no history in it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "history.jsonl").write_text('{"round": 0, "virtual_s": 0.0}')
    ...     read_history(folder).rounds[0]["virtual_s"]
    0.0
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise invalid("run directory", str(directory), "exist")
    path = folder / HISTORY
    if not path.is_file():
        runs = sorted(str(found.parent) for found in folder.glob(f"*/{HISTORY}"))
        hint = f"did you mean {' '.join(runs)}" if runs else ""
        raise invalid("run directory", str(directory), f"hold a {HISTORY}", hint)
    notes = []
    rounds: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            record, why = parse(line)
            if record is None:
                why = why if line.endswith("\n") else "is torn"
                notes.append(f"line {number} {why} and was left out")
                continue
            if record["round"] in rounds:
                notes.append(f"round {record['round']} occurs twice; the later line counts")
            rounds[record["round"]] = record
    return History(tuple(rounds[number] for number in sorted(rounds)), tuple(notes))


def as_dict(value: Any) -> dict[str, Any]:
    """Return a dict of the history; an empty one where it has something else."""
    return value if isinstance(value, dict) else {}


def as_number(value: Any) -> float:
    """Return a finite number of the history; NaN where it has something else."""
    is_number = isinstance(value, int | float) and isfinite(value)
    return float(value) if is_number else float("nan")


PLAIN = {int, float, bool, type(None)}


def as_numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the finite numbers of a list of the history; NaN where it has something else."""
    plain = set(map(type, values)) <= PLAIN
    array = np.array(values if plain else [as_number(value) for value in values], np.float64)
    array[np.isinf(array)] = np.nan
    return array


LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


def lower_is_better(metric: str) -> bool:
    """Return whether a metric improves by falling."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def best_round(history: History, metric: str, *, falls: bool | None = None) -> int:
    """Find the position of a metric's best value."""
    values = history.metric(metric)
    return int(np.nanargmin(values) if _falls(metric, falls) else np.nanargmax(values))


def settled_value(history: History, metric: str, *, falls: bool | None = None) -> float:
    """Return the level that a run holds at its end: the median of its last five values."""
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-5:].tolist(), reverse=_falls(metric, falls))
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History,
    metric: str,
    target: float,
    clock: str = "virtual_s",
    *,
    falls: bool | None = None,
) -> float | None:
    """Return when a run first reaches a target: seconds or rounds since the start, None if never.

    Parameters
    ----------
    history : History
        A run.
    metric : str
        As for :meth:`History.metric`.
    target : float
        The value to reach.
    clock : {"virtual_s", "wall_s", "round"}
        What to measure by.
    falls : bool, optional
        Whether the metric must fall to the target; by its name if left out.

    Raises
    ------
    ValueError
        If the metric or the clock is unknown, or the target not finite.

    Examples
    --------
    >>> history = History(
    ...     (
    ...         {"round": 0, "virtual_s": 0.0, "global": {"accuracy": 0.1}},
    ...         {"round": 1, "virtual_s": 18.0, "global": {"accuracy": 0.6}},
    ...     )
    ... )
    >>> time_to_target(history, "accuracy", 0.5)
    18.0
    """
    check_choice("clock", clock, CLOCKS)
    check_number("target", target, "(-inf, inf)")
    values, times = history.metric(metric), history.column(clock)
    with np.errstate(invalid="ignore"):
        reached = values <= target if _falls(metric, falls) else values >= target
    hits = times[reached & ~np.isnan(times)]
    return float(hits[0]) if len(hits) else None


def _falls(metric: str, falls: bool | None) -> bool:
    return lower_is_better(metric) if falls is None else falls
