"""What a history says of the nodes: tier, latency, how often each trained and failed."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.report.history import History

TIFL = "tifl"
"""Section of the history that holds tiers."""


@dataclass(frozen=True)
class NodeFacts:
    """One node over a run.

    Parameters
    ----------
    identity : str
        Its stable identity.
    tier : int or None
        Latest tier, 0 the fastest; None if it has none.
    profiled_s : float
        Latency of the latest profiling in seconds, NaN if unknown.
    latency_s : ndarray of float64, shape (num_replies,)
        Latencies of its good replies in seconds.
    selected, in_vain : int
        Rounds that it was asked to train in, and those of them without a good reply.
    """

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
    """Collect what is known of each node.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    list of NodeFacts
        By tier, then latency, then name; nodes without a tier come last.

    Examples
    --------
    >>> record = {"round": 1, "selected": ["node-1"], "latency": {"node-1": 2.5}}
    >>> [node] = node_facts(History((record,)))
    >>> node.identity, node.selected, node.typical_s
    ('node-1', 1, 2.5)
    """
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
    """Return the tiers of the latest profiling.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    tiers : dict of str to int
        Identity to tier; empty without TiFL.
    latency : dict of str to float
        Identity to profiled latency in seconds.
    """
    for record in reversed(history.rounds):
        info = record.get(TIFL) or {}
        if "tiers" in info:
            return dict(info["tiers"]), dict(info.get("latency") or {})
    return {}, {}


def num_tiers(history: History) -> int:
    """Return how many tiers a run has or had; 0 without TiFL.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    int
        Number of tiers.
    """
    counts = [len(of_tiers(record, "tier_probs")) for record in history.rounds]
    return max([0, *counts, *(1 + tier for tier in latest_tiers(history)[0].values())])


def of_tiers(record: Mapping[str, Any], key: str) -> list[float]:
    """Return a figure of each tier in a round, such as ``credits``.

    Parameters
    ----------
    record : mapping
        A round.
    key : str
        Name of a list in TiFL's section of it.

    Returns
    -------
    list of float
        One per tier, NaN where unknown; empty if the round has none.
    """
    values = (record.get(TIFL) or {}).get(key) or []
    return [_seconds(value) for value in values]


def faults(history: History) -> list[Fault]:
    """Group failures by node and reason.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    list of Fault
        The most frequent first.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for number, fault in _failures(history):
        groups.setdefault((fault["node"], fault["reason"]), []).append(number)
    found = [Fault(node, reason, rounds) for (node, reason), rounds in groups.items()]
    return sorted(found, key=lambda fault: (-len(fault.rounds), natural(fault.node)))


def natural(identity: str) -> list[tuple[int, int | str]]:
    """Make a sort key by which node-2 comes before node-10.

    Parameters
    ----------
    identity : str
        Any text.

    Returns
    -------
    list of tuple
        Comparable with those of other texts.

    Examples
    --------
    >>> sorted(["node-10", "node-2", "jetson"], key=natural)
    ['jetson', 'node-2', 'node-10']
    """
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
