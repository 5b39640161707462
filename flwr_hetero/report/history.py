"""The files of a run directory, and the figures in the history of a run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import clean, invalid
from flwr_hetero.report.masking import masked

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
# A figure by its section in a line of the history and its key in that section.
Key: TypeAlias = tuple[str, str]

# The memory that a history takes is bounded, even if a node makes up metrics.
MAX_KEYS = 1000
MAX_FLOAT = float(np.finfo(np.float64).max)

# The files of a run directory.
CONFIG = "config.json"
HISTORY = "history.jsonl"
MODEL = "model.safetensors"
REPORT = "report.html"
CHECKPOINT = "checkpoint"
LOCK = ".lock"

# Sections of a line that this package reads.
TIFL = "tifl"
FEDBUFF = "fedbuff"
FEDSLICE = "fedslice"
FAIRNESS = "fairness"
SECONDS = "seconds"
# The parts into which the section "seconds" divides the time of a message.
PARTS = ("wait", "start", "receive", "train", "send")
# Sections with metrics of the app. A bare metric name is looked up in this order.
METRICS = ("global", "evaluate", "train")
# Sections whose keys are nodes.
BY_NODE = ("latency", "weights")
# The round whose model the nodes evaluated while others were training; not a metric.
EVALUATED = "evaluated_round"
# Keys of the clocks in the history, and their names on pages.
CLOCKS = {
    "virtual_s": "time on the fleet's clock",
    "wall_s": "time on the server's clock",
    "round": "rounds",
}


def plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold; a number that is not finite becomes None."""
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
    """Read the settings of a run; an empty dict if the file is missing or damaged."""
    try:
        text = (Path(directory) / CONFIG).read_text(encoding="utf-8")
        config = as_dict(cleaned(json.loads(text)))
        # Mask again: older versions recognized fewer secrets.
        return config | {"settings": masked(as_dict(config.get("settings")))}
    except (OSError, ValueError, RecursionError):
        return {}


# Compared by identity, so that functions can cache what they compute from a history.
@dataclass(frozen=True, eq=False)
class History:
    """The rounds of a run.

    Parameters
    ----------
    rounds : tuple of dict
        One record per round, in order. Round 0 is the state before training. Among its keys:

        - ``latency``: seconds that a message took, as each node reports them.
        - ``seconds``: for real nodes, how the round trip divides into ``wait``, ``start``,
          ``receive``, ``train`` and ``send``. Each part has seconds by node and leaves out the
          nodes that do not measure it. ``wait`` is the rest. ``steps`` is ``train``
          without the time for reading data.
        - ``train_range``, ``evaluate_range``: lowest, median and highest value of each metric over
          the nodes.
        - ``limited``: nodes whose value of a metric was ignored.
        - ``shortened``: the factor by which a node's update was shortened.
    notes : tuple of str
        Which lines of the file could not be read.

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
    def unit(self) -> str:
        """What a record describes: "round", or "server update" in a run without rounds."""
        sections = {section for record in self.rounds for section in record}
        return "server update" if FEDBUFF in sections and FEDSLICE not in sections else "round"

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds that all nodes together worked, by round."""
        return np.nan_to_num(self.column("device_s"))

    @cached_property
    def traffic(self) -> Floats:
        """Bytes sent and received, by round."""
        return np.nan_to_num(self.column("bytes_up")) + np.nan_to_num(self.column("bytes_down"))

    @property
    def clock(self) -> tuple[str, Floats]:
        """Key and seconds of the fleet's clock, or of the server's clock if there is no other."""
        name = "virtual_s" if np.nansum(self.column("virtual_s")) > 0 else "wall_s"
        return name, self.column(name)

    @cached_property
    def table(self) -> dict[Key, Floats]:
        """Lowest, median and highest number of each figure: arrays of shape (rounds, 3)."""
        return tabulate(self.rounds)

    @cached_property
    def names(self) -> dict[str, Key]:
        """Names of all figures: a bare name for a metric if it is unique, else ``section/key``."""
        ranks = {section: rank for rank, section in enumerate(METRICS)}
        names: dict[str, Key] = {}
        for section, key in sorted(self.table, key=lambda key: ranks.get(key[0], len(METRICS))):
            if key:
                is_unique = section in METRICS and key not in names
                names[key if is_unique else f"{section}/{key}"] = (section, key)
        return names

    def column(self, section: str, key: str = "") -> Floats:
        """Return one number per round, such as ``"tifl", "tier"``; NaN where there is none."""
        ranges = self.table.get((section, key))
        return np.full(len(self.rounds), nan) if ranges is None else ranges[:, 1].copy()

    def metric(self, name: str) -> Floats:
        """Return a metric per round, by bare name or ``section/key``; NaN where it is missing.

        If a round has several numbers, such as one per node, their median is returned. ValueError
        if no round has the metric.
        """
        return self.range_of(name)[:, 1]

    def range_of(self, name: str) -> Floats:
        """Return the lowest, median and highest number of a metric: shape (rounds, 3)."""
        key = self.names.get(name, tuple(name.split("/", 1)))
        if key not in self.table:
            names = ", ".join(self.names) or "none at all"
            raise invalid("metric", name, f"be in the history, which has {names}")
        return self.table[key]

    def main_metric(self) -> str | None:
        """Return the metric to judge the run by: an accuracy, else a loss, else any other."""
        names = [name for name, (section, _) in self.names.items() if section in METRICS]
        for word in ("acc", "loss", ""):
            for name in names:
                if word in name.lower():
                    return name
        return None


def tabulate(rounds: Sequence[dict[str, Any]]) -> dict[Key, Floats]:
    """Collect the figures of rounds as arrays of shape (rounds, 3), at most a thousand of them."""
    table: dict[Key, Floats] = {}
    for place, record in enumerate(rounds):
        for key, numbers in _figures(record):
            if key not in table:
                if len(table) == MAX_KEYS:
                    continue
                table[key] = np.full((len(rounds), 3), nan)
            table[key][place] = min(numbers), median(numbers), max(numbers)
    return table


def _figures(record: dict[str, Any]) -> Iterator[tuple[Key, list[float]]]:
    """Yield each figure of a record with its numbers."""
    for section, entries in record.items():
        has_keys = isinstance(entries, dict) and section not in BY_NODE
        for key, value in entries.items() if has_keys else [("", entries)]:
            # A metric is one number. A figure of a wrapper may be one number per node or tier.
            is_metric_list = section in METRICS and isinstance(value, list)
            if key != EVALUATED and not is_metric_list:
                numbers = numbers_in(value)
                if numbers:
                    yield (section, key), numbers


def read_history(directory: str | Path) -> History:
    """Read the history of a run directory; lines that are not a round are skipped and noted.

    If a round has several lines, the last one counts. ValueError if the directory or its history
    does not exist.

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
        raise invalid("run directory", str(folder), "exist")
    if not (folder / HISTORY).is_file():
        raise invalid("run directory", str(folder), f"hold a {HISTORY}")
    rounds: dict[int, dict[str, Any]] = {}
    notes = []
    # Read bytes: a text may contain other line separators, which JSON does not escape.
    with (folder / HISTORY).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = parse(line.decode(errors="replace"))
                rounds[record["round"]] = record
            except ValueError as error:
                problem = error if line.endswith(b"\n") else "is incomplete"
                notes.append(f"line {number} {problem} and was skipped")
    return History(tuple(rounds[number] for number in sorted(rounds)), tuple(notes))


def parse(line: str) -> dict[str, Any]:
    """Read a line of a history; ValueError if it is not a round."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise ValueError("is not a round")
    # Older versions wrote texts of nodes without making them printable.
    if "\\" in line or not line.rstrip("\n").isprintable():
        record = cleaned(record)
    return as_dict(record)


def cleaned(value: Any) -> Any:
    """Make all names and texts in a value printable."""
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return clean(value, len(value)) if isinstance(value, str) else value


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value of the history if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def as_number(value: Any) -> float:
    """Return a value of the history if it is a finite number, else NaN."""
    is_finite = isinstance(value, int | float) and -MAX_FLOAT <= value <= MAX_FLOAT
    return float(value) if is_finite else nan


def numbers_in(value: Any) -> list[float]:
    """Return the finite numbers of an entry; none if it holds anything but numbers and None."""
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, int | float) for item in items):
        return []
    return [item for item in items if item is not None and -MAX_FLOAT <= item <= MAX_FLOAT]
