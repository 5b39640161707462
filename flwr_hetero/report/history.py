"""The history of a run: the files of its directory, its lines as they are read, its figures."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import clean, invalid
from flwr_hetero.report.masking import masked

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Key: TypeAlias = tuple[str, str]
Row: TypeAlias = tuple[float, float, float]
# Lowest, median and highest number of a figure in each round: (rounds, 3).
Ranges: TypeAlias = dict[Key, Floats]
# Figures of a run: one of a node that makes up names has more.
MOST_KEYS = 1000
MAX_FLOAT = float(np.finfo(np.float64).max)

CONFIG, HISTORY, MODEL = "config.json", "history.jsonl", "model.safetensors"
REPORT, CHECKPOINT, LOCK = "report.html", "checkpoint", ".lock"

# Sections of tiers, of updates by nodes that do not wait, of rounds with several of them.
TIFL, FEDBUFF, FEDSLICE = "tifl", "fedbuff", "fedslice"
# Section of how good the model is on each node.
FAIRNESS = "fairness"
# Section of what the seconds of a message were, by part and node; real nodes only.
SECONDS, PARTS = "seconds", ("wait", "start", "receive", "train", "send")
# Where metrics are looked up, in this order: central evaluation first.
METRICS = ("global", "evaluate", "train")
# Sections whose keys are nodes.
BY_NODE = ("latency", "weights")
# No metric: the round whose model the nodes evaluated, while others trained on.
EVALUATED = "evaluated_round"
# Clock in the history to its name on pages.
CLOCKS = {"virtual_s": "time on the fleet's clock", "wall_s": "time on the server's clock"}
CLOCKS["round"] = "rounds"


def plain(value: Any) -> Any:
    """Convert a value to what JSON can hold."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the settings of a run; none if the file is missing or damaged."""
    try:
        text = (Path(directory) / CONFIG).read_text(encoding="utf-8")
        config = as_dict(cleaned(json.loads(text)))
        # older versions hid fewer
        return config | {"settings": masked(as_dict(config.get("settings")))}
    except (OSError, ValueError, RecursionError):
        return {}


# Equal to itself only, so that what is found out about it can be kept.
@dataclass(frozen=True, eq=False)
class History:
    """The rounds of a run.

    Parameters
    ----------
    rounds : tuple of dict
        One record per round, in order; round 0 is the state before training. ``latency`` has the
        seconds that each node says a message took. On real nodes ``seconds`` divides the round trip
        of it: by part (``wait``, ``start``, ``receive``, ``train``, ``send``) the seconds of each
        node, which is left out of a part that it does not measure. ``wait`` is the rest, ``steps``
        what those took of ``train``. ``train_range`` and ``evaluate_range`` have of each metric the
        lowest, median and highest value of the nodes. ``limited`` says whose value did not count,
        ``shortened`` to what part of its length a node's update was cut.
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

    @property
    def last_round(self) -> int:
        """Number of the last round; -1 if there is none."""
        return int(self.rounds[-1]["round"]) if self.rounds else -1

    @property
    def is_buffered(self) -> bool:
        """Whether no node waits for others: each reply is used as it comes."""
        return any(FEDBUFF in record for record in self.rounds)

    @property
    def unit(self) -> str:
        """What a record is of: a round, or a server update of a run without rounds."""
        is_of_rounds = any(FEDSLICE in record for record in self.rounds)
        return "server update" if self.is_buffered and not is_of_rounds else "round"

    @cached_property
    def busy_s(self) -> Floats:
        """How long nodes worked in each round, all nodes together."""
        return np.nan_to_num(self.column("device_s"))

    @property
    def clock(self) -> tuple[str, Floats]:
        """The fleet's clock by its key, or the server's where there is no other."""
        name = "virtual_s" if np.nansum(self.column("virtual_s")) > 0 else "wall_s"
        return name, self.column(name)

    @cached_property
    def table(self) -> Ranges:
        """Lowest, median and highest number in each round, (rounds, 3), by section and key."""
        return tabulate(self.rounds)

    @cached_property
    def names(self) -> dict[str, tuple[str, str]]:
        """Metrics by bare name, first; figures, and names that are taken, as ``section/key``."""
        found: dict[str, tuple[str, str]] = {}
        order = sorted(self.table, key=lambda place: (*METRICS, place[0]).index(place[0]))
        for section, key in order:
            is_free = section in METRICS and key not in found
            found |= {key if is_free else f"{section}/{key}": (section, key)} if key else {}
        return found

    def column(self, section: str, key: str = "") -> Floats:
        """Collect one number per round, such as ``"tifl", "tier"``; NaN where there is none."""
        known = self.table.get((section, key))
        return np.full(len(self.rounds), nan) if known is None else known[:, 1].copy()

    def metric(self, name: str) -> Floats:
        """Collect a metric per round, by bare name or ``section/key``; NaN where a round has none.

        Of several numbers, such as one per node, it is the median. ValueError if no round has it.
        """
        return self.range_of(name)[:, 1]

    def range_of(self, name: str) -> Floats:
        """Collect the lowest, median and highest number of a metric: shape (rounds, 3)."""
        place = self.names.get(name, tuple(name.split("/", 1)))
        if place not in self.table:
            known = ", ".join(self.names) or "none at all"
            raise invalid("metric", name, f"be in the history, which has {known}")
        return self.table[place]

    def main_metric(self) -> str | None:
        """Return the metric to judge the run by: an accuracy, else a loss, else any."""
        names = [name for name, (section, _) in self.names.items() if section in METRICS]
        found = (name for word in ("acc", "loss", "") for name in names if word in name.lower())
        return next(found, None)


def tabulate(rounds: Sequence[dict[str, Any]]) -> Ranges:
    """Collect the numbers of rounds; of more than a thousand figures the first ones."""
    places, rows = defaultdict[Key, list[int]](list), defaultdict[Key, list[Row]](list)
    for place, record in enumerate(rounds):
        for section, entries in record.items():
            is_named = isinstance(entries, dict) and section not in BY_NODE
            for key, value in entries.items() if is_named else [("", entries)]:
                # A metric is one number; of a wrapper each node, tier or reply may have one.
                is_list = section in METRICS and isinstance(value, list)
                if key != EVALUATED and not is_list and (numbers := numbers_in(value)):
                    at = section, key
                    if at in rows or len(rows) < MOST_KEYS:
                        single = len(numbers) == 1
                        middle = numbers[0] if single else median(numbers)
                        rows[at].append((min(numbers), middle, max(numbers)))
                        places[at].append(place)
    found = {at: np.full((len(rounds), 3), nan) for at in rows}
    for at, table in found.items():
        table[places[at]] = rows[at]
    return found


class HistoryReader:
    """Read a history while it grows: each of its lines once."""

    def __init__(self, directory: str | Path) -> None:
        self.folder, self._inode = Path(directory), -1
        self._forget()

    def _forget(self) -> None:
        self._end, self._lines = 0, 0
        self.rounds: list[dict[str, Any]] = []
        self.table: Ranges = {}
        self.notes: list[str] = []

    def read(self) -> History:
        """Return the rounds that there are now; ValueError if there is no history."""
        if not self.folder.is_dir():
            raise invalid("run directory", str(self.folder), "exist")
        if not (self.folder / HISTORY).is_file():
            raise invalid("run directory", str(self.folder), f"hold a {HISTORY}")
        new, torn = self._read_new()
        # a line of a round that there is already takes its place
        first = min((record["round"] for record in new), default=inf)
        if self.rounds and first <= self.rounds[-1]["round"]:
            new, self.rounds, self.table = [*self.rounds, *new], [], {}
        in_order = {record["round"]: record for record in new}
        new = [in_order[number] for number in sorted(in_order)]
        before, self.rounds = len(self.rounds), self.rounds + new
        self.table = appended(self.table, before, tabulate(new), len(new))
        history = History(tuple(self.rounds), (*self.notes, *torn))
        vars(history)["table"] = self.table
        return history

    def _read_new(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rounds of new lines, and what to say of one that is not whole yet."""
        new: list[dict[str, Any]] = []
        # bytes: texts may hold other separators of lines, and JSON does not escape them all
        with (self.folder / HISTORY).open("rb") as lines:
            status = os.fstat(lines.fileno())
            # a resumed run has another file
            if status.st_ino != self._inode or status.st_size < self._end:
                self._forget()
            self._inode = status.st_ino
            lines.seek(self._end)
            for number, line in enumerate(lines, start=self._lines + 1):
                whole, text = line.endswith(b"\n"), line.decode(errors="replace")
                try:
                    record = parse(text)
                except ValueError as error:
                    note = f"line {number} {error if whole else 'is incomplete'} and was left out"
                    if not whole:
                        return new, [note]
                    self.notes.append(note)
                else:
                    new.append(record)
                self._end, self._lines = self._end + len(line), number
        return new, []


def appended(table: Ranges, length: int, more: Ranges, number: int) -> Ranges:
    """Add the rows of further rounds to a table of ``length`` rounds."""
    both, rows = [*dict.fromkeys([*table, *more])][:MOST_KEYS], (length, number)
    empty = [np.full((count, 3), nan) for count in rows]
    pairs = {at: [table.get(at, empty[0]), more.get(at, empty[1])] for at in both}
    return {at: np.concatenate(pair) for at, pair in pairs.items()}


def read_history(directory: str | Path) -> History:
    """Read the history of a run directory; a line that is no round is left out and noted.

    Of a round's lines the last counts. ValueError if there is no such directory, or no history.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "history.jsonl").write_text('{"round": 0, "virtual_s": 0.0}')
    ...     read_history(folder).rounds[0]["virtual_s"]
    0.0
    """
    return HistoryReader(directory).read()


# -- one line --

OLD = (
    *("biased-local-sgd", "cd-grab", "local-steps", "model-average", "over-select"),
    *("power-of-choice", "balanced-by", "bytes-down", "bytes-up", "by-node", "examples-wanted"),
    *("herding-bound", "num-steps", "own-share", "pairs-together", "samples-known", "signed-sum"),
    "worst-tenth",
)
# Wrappers and their figures in lines of older versions, to their names of today.
SPELLING: dict[Any, str] = {name: name.replace("-", "_") for name in OLD}
OLD_NAMES = re.compile(f'"(?:{"|".join(OLD)}|evaluated-round)"')


def parse(line: str) -> dict[str, Any]:
    """Read a line; a ValueError says that it is not a round's."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or type(found.get("round")) is not int:
        raise ValueError("is no round")
    # nodes' texts in lines of older versions may not be printable
    if "\\" in line or not line.rstrip("\n").isprintable():
        found = cleaned(found)
    if not OLD_NAMES.search(line):
        return as_dict(found)
    return {str(SPELLING.get(k, k)): _respelled(k, value) for k, value in found.items()}


def _respelled(section: str, entries: Any) -> Any:
    """Give figures today's names; metrics and nodes are called as users called them."""
    if not isinstance(entries, dict) or section in BY_NODE:
        return entries
    names = {"evaluated-round": EVALUATED} if section in METRICS else SPELLING
    return {names.get(key, key): value for key, value in entries.items()}


def cleaned(value: Any) -> Any:
    """Return a value whose names and texts can be printed."""
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return clean(value, len(value)) if isinstance(value, str) else value


def as_dict(value: Any) -> dict[str, Any]:
    """Return a dict of the history; an empty one where it has something else."""
    return value if isinstance(value, dict) else {}


def as_number(value: Any) -> float:
    """Return a finite number of the history; NaN where it has something else."""
    known = isinstance(value, int | float) and -MAX_FLOAT <= value <= MAX_FLOAT
    return float(value) if known else nan


def numbers_in(value: Any) -> list[float]:
    """Return the numbers in an entry; none if it holds anything else."""
    items = [*value.values()] if isinstance(value, dict) else value
    known = [x for x in (items if isinstance(items, list) else [items]) if x is not None]
    is_known = all(isinstance(x, int | float) for x in known)
    return [x for x in known if -MAX_FLOAT <= x <= MAX_FLOAT] if is_known else []
