"""The files of a run directory: their names, and writing them whole or not at all."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

CONFIG = "config.json"


HISTORY = "history.jsonl"


MODEL = "model.safetensors"


REPORT = "report.html"


CHECKPOINT = "checkpoint"


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the settings of a run."""
    try:
        facts = json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


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


CLOCKS = {
    "virtual_s": "time on the fleet's clock",
    "wall_s": "time on the server's clock",
    "round": "rounds",
}
"""What a run is measured by, as the history and as people call it."""


LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


def lower_is_better(metric: str) -> bool:
    """Tell which way a metric improves."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def best_round(history: History, metric: str, *, falls: bool | None = None) -> int:
    """Find the position of a metric's best value."""
    values = history.metric(metric)
    return int(np.nanargmin(values) if _falls(metric, falls) else np.nanargmax(values))


def settled_value(
    history: History, metric: str, last: int = 5, *, falls: bool | None = None
) -> float:
    """Return the level that a run holds at its end."""
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-last:].tolist(), reverse=_falls(metric, falls))
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History,
    metric: str,
    target: float,
    clock: str = "virtual_s",
    *,
    falls: bool | None = None,
) -> float | None:
    """Tell when a run first reaches a target.

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
        Whether the metric must fall to the target, or rise; as for :func:`best_round`.

    Returns
    -------
    float or None
        Seconds since the start, or the round; None if the target is never reached.

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
    if clock not in CLOCKS:
        raise invalid("clock", clock, f"be one of {', '.join(CLOCKS)}", "choose one")
    if not np.isfinite(target):
        raise invalid("target", target, "be a finite number", "leave it out for the default")
    values, times = history.metric(metric), history.column(clock)
    with np.errstate(invalid="ignore"):
        reached = values <= target if _falls(metric, falls) else values >= target
    hits = times[reached & ~np.isnan(times)]
    return float(hits[0]) if len(hits) else None


def _falls(metric: str, falls: bool | None) -> bool:
    return lower_is_better(metric) if falls is None else falls


TIFL = "tifl"
"""Section of the history that holds tiers."""


@dataclass(frozen=True)
class NodeFacts:
    """One node over a run."""

    identity: str
    tier: int | None
    profiled_s: float
    latency_s: NDArray[np.float64]
    selected: int
    in_vain: int

    @property
    def typical_s(self) -> float:
        """Median of its latencies, or the profiled one; NaN if both are unknown."""
        return float(np.median(self.latency_s)) if len(self.latency_s) else self.profiled_s


class Fault(NamedTuple):
    """The same failure of one node, over all rounds.

    Parameters
    ----------
    node : str
        Its stable identity.
    reason : str
        As logged.
    rounds : list of int
        When it happened.
    """

    node: str
    reason: str
    rounds: list[int]


def node_facts(history: History) -> list[NodeFacts]:
    """Collect what is known of each node."""
    tiers, profiled = latest_tiers(history)
    selected = Counter(name for record in history.rounds for name in record.get("selected") or ())
    in_vain = Counter(name for record in history.rounds for name in _lost(record))
    latency: dict[str, list[float]] = {}
    for record in history.rounds:
        for name, seconds in (record.get("latency") or {}).items():
            if seconds is not None:
                latency.setdefault(name, []).append(seconds)
    everyone = {*tiers, *profiled, *selected, *latency}
    nodes = [
        NodeFacts(
            identity=name,
            tier=tiers.get(name),
            profiled_s=_seconds(profiled.get(name)),
            latency_s=np.array(latency.get(name, []), np.float64),
            selected=selected[name],
            in_vain=in_vain[name],
        )
        for name in sorted(everyone, key=natural)
    ]
    return sorted(
        nodes,
        key=lambda node: (
            np.inf if node.tier is None else node.tier,
            np.inf if np.isnan(node.typical_s) else node.typical_s,
        ),
    )


def latest_tiers(history: History) -> tuple[dict[str, int], dict[str, float | None]]:
    """Return the tiers of the latest profiling."""
    for record in reversed(history.rounds):
        info = record.get(TIFL) or {}
        if "tiers" in info:
            return dict(info["tiers"]), dict(info.get("latency") or {})
    return {}, {}


def num_tiers(history: History) -> int:
    """Return how many tiers a run has or had; 0 without TiFL."""
    counts = [len(of_tiers(record, "tier_probs")) for record in history.rounds]
    return max([0, *counts, *(1 + tier for tier in latest_tiers(history)[0].values())])


def of_tiers(record: Mapping[str, Any], key: str) -> list[float]:
    """Return a figure of each tier in a round, such as ``credits``."""
    values = (record.get(TIFL) or {}).get(key) or []
    return [_seconds(value) for value in values]


def faults(history: History) -> list[Fault]:
    """Group failures by node and reason."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, fault in _failures(history):
        groups.setdefault((fault["node"], fault["reason"]), []).append(number)
    found = [Fault(node, reason, rounds) for (node, reason), rounds in groups.items()]
    return sorted(found, key=lambda fault: (-len(fault.rounds), natural(fault.node)))


def natural(identity: str) -> list[tuple[int, int | str]]:
    """Make a sort key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", identity)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def _failures(history: History) -> list[tuple[int, dict[str, str]]]:
    return [
        (record["round"], {"node": str(fault.get("node")), "reason": str(fault.get("reason"))})
        for record in history.rounds
        for fault in record.get("failures") or ()
    ]


def _lost(record: Mapping[str, Any]) -> set[str]:
    """Return who was asked to train and did not reply well; evaluation has failures too."""
    failed = {fault.get("node") for fault in record.get("failures") or ()}
    return (failed & {*(record.get("selected") or ())}) - {*(record.get("latency") or ())}


def _seconds(value: float | None) -> float:
    return float("nan") if value is None else float(value)
