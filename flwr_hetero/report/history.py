"""Reading a run's history: one JSON object per round and line.

========== ===========================================================================
key        meaning
========== ===========================================================================
round      number of the round; 0 is the state before training, profiling included
virtual_s  time so far by the fleet's clock, in seconds
wall_s     time so far by the server's clock, in seconds
bytes_up   bytes of the training replies of this round; bytes_down: of the instructions
global     metrics of the central evaluation
evaluate   metrics of the nodes' evaluation, as aggregated
train      metrics of the nodes' training, as aggregated
selected   identities of the nodes that were asked to train
latency    identity to seconds, for every good reply
failures   list of ``{"node": identity, "reason": text}``
*wrapper*  a dict per wrapper under its name, such as ``tifl``; figures, lists of figures
           and dicts of figures in it are drawn without code of their own
========== ===========================================================================
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.report.files import HISTORY

METRICS = ("global", "evaluate", "train")
"""Where metrics are looked up, in this order: central evaluation first."""


@dataclass(frozen=True)
class History:
    """The rounds of a run.

    Parameters
    ----------
    rounds : tuple of dict
        One record per round, in order; round 0 is the state before training.
    notes : tuple of str
        What the reader had to pass over, for people.

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

    def column(self, *path: str) -> NDArray[np.float64]:
        """Collect one number per round.

        Parameters
        ----------
        *path : str
            Keys that lead to the number, for instance ``"tifl", "tier"``.

        Returns
        -------
        ndarray of float64, shape (num_rounds,)
            NaN in rounds that have no number there.
        """
        return np.array([_number(_dig(record, path)) for record in self.rounds], np.float64)

    def sections(self) -> list[str]:
        """Return the keys under which rounds keep a dict of figures: metrics, then wrappers."""
        found = {
            key: None
            for record in self.rounds
            for key, value in record.items()
            if isinstance(value, dict) and key not in (*METRICS, "latency")
        }
        return [*METRICS, *found]

    def metrics(self, sections: tuple[str, ...] | None = None) -> list[str]:
        """Return the names that :meth:`metric` knows.

        Parameters
        ----------
        sections : tuple of str, optional
            Only those; all of them if left out.

        Returns
        -------
        list of str
            Bare names for metrics, ``section/key`` for wrappers' figures and where a name
            stands for something else already.
        """
        names: dict[str, None] = {}
        for section in self.sections() if sections is None else sections:
            for key in self._numeric_keys(section):
                is_free = section in METRICS and key not in names
                names[key if is_free else f"{section}/{key}"] = None
        return list(names)

    def metric(self, name: str) -> NDArray[np.float64]:
        """Collect a metric over the rounds.

        Parameters
        ----------
        name : str
            ``accuracy``, or with its section: ``evaluate/accuracy``,
            ``herding/herding-bound``.

        Returns
        -------
        ndarray of float64, shape (num_rounds,)
            NaN where a round has none.

        Raises
        ------
        ValueError
            If no round has it; the message names those that there are.
        """
        section, slash, key = name.partition("/")
        if slash and not np.isnan(values := self.column(section, key)).all():
            return values
        for section in METRICS:
            if not np.isnan(values := self.column(section, name)).all():
                return values
        known = ", ".join(self.metrics()) or "none at all"
        raise invalid("metric", name, f"be in the history, which has {known}", "choose one")

    def main_metric(self) -> str | None:
        """Return the metric to judge the run by: an accuracy, else a loss, else any."""
        names = self.metrics(METRICS)
        for word in ("acc", "loss", ""):
            for name in names:
                if word in name.lower():
                    return name
        return None

    def _numeric_keys(self, section: str) -> list[str]:
        found = {
            key: None
            for record in self.rounds
            for key, value in _as_dict(record.get(section)).items()
            if not np.isnan(_number(value))
        }
        return list(found)


def read_history(directory: str | Path) -> History:
    """Read the history of a run; a line that is no round is passed over and noted.

    Parameters
    ----------
    directory : str or Path
        A run directory.

    Returns
    -------
    History
        Rounds in order. Where a round stands twice, the later line counts.

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
        raise invalid("run directory", str(directory), "exist", "check the path")
    path = folder / HISTORY
    if not path.is_file():
        runs = sorted(str(found.parent) for found in folder.glob(f"*/{HISTORY}"))
        cure = f"did you mean {' '.join(runs)}" if runs else "pass the output-dir of a run"
        raise invalid("run directory", str(directory), f"hold a {HISTORY}", cure)
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines += [rest] if rest else []
    notes = []
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            torn = number == len(lines) and rest
            notes.append(f"line {number} is {'torn' if torn else 'no round'} and was left out")
            continue
        if record["round"] in rounds:
            notes.append(f"round {record['round']} stands twice; the later line counts")
        rounds[record["round"]] = record
    return History(tuple(rounds[number] for number in sorted(rounds)), tuple(notes))


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        return None
    return record


def _dig(record: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        record = _as_dict(record).get(key)
    return record


def _as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
