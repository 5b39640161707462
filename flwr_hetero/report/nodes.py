"""Nodes, tiers, fairness and failures, as a history records them."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, isfinite, nan
from statistics import median
from typing import NamedTuple

import numpy as np

from flwr_hetero.report.history import (
    EVALUATED,
    FAIRNESS,
    PARTS,
    SECONDS,
    TIFL,
    Floats,
    History,
    as_dict,
    as_number,
)

# Share of the nodes that a page calls the slowest.
SLOWEST = 0.2


class NodeStats(NamedTuple):
    """One node over a run."""

    identity: str
    tier: int | None
    selected: int
    lost: int
    """Rounds in which the node was to train, but the server used no reply."""
    typical_s: float
    """Median of its latencies, or the profiled latency; NaN if both are unknown."""


class Fairness(NamedTuple):
    """How good the model of a round is on each node, as last measured."""

    round: int
    metric: str
    nodes: int
    mean: float
    worst: float
    """Mean over the worst tenth of the nodes."""
    by_node: dict[str, float]
    """Values by node; of a large fleet the history has the worst nodes only."""


@lru_cache(2)
def node_stats(history: History) -> list[NodeStats]:
    """Summarize each node, sorted by tier and then by latency."""
    tiers, profiled = latest_tiers(history)
    selected = Counter[str]()
    lost = Counter[str]()
    latencies: dict[str, list[float]] = defaultdict(list)
    for record in history.rounds:
        asked = record.get("selected") or ()
        failed = {failure["node"] for failure in record.get("failures") or ()}
        latency = record.get("latency") or {}
        selected.update(asked)
        # A node with a latency has trained: its failure is one of the evaluation.
        lost.update((failed & set(asked)) - set(latency))
        for name, seconds in as_dict(latency).items():
            latencies[name] += [] if seconds is None else [seconds]
    stats = []
    for name in sorted({*tiers, *profiled, *selected, *latencies}, key=_natural):
        typical_s = float(median(latencies[name] or [as_number(profiled.get(name))]))
        stats.append(NodeStats(name, tiers.get(name), selected[name], lost[name], typical_s))
    # lexsort puts NaN last and keeps the order of equal nodes.
    keys = [(node.typical_s, as_number(node.tier)) for node in stats]
    return [stats[place] for place in np.lexsort(np.reshape(keys, (-1, 2)).T)]


@lru_cache(2)
def message_parts(history: History) -> dict[str, Floats]:
    """Return by node the median seconds of each part of a message, the fastest node first.

    The arrays have the order of ``PARTS``, and NaN for a part that is unknown.
    """
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in history.rounds:
        for part in PARTS:
            for name, value in as_dict(as_dict(record.get(SECONDS)).get(part)).items():
                if value is not None:
                    seconds[name][part].append(as_number(value))
    medians = {
        name: np.array([median(by_part.get(part, [nan])) for part in PARTS])
        for name, by_part in seconds.items()
    }
    names = sorted(medians, key=lambda name: (np.nansum(medians[name]), _natural(name)))
    return {name: medians[name] for name in names}


def latest_tiers(history: History) -> tuple[dict[str, int], dict[str, float | None]]:
    """Return tier and latency by node, as of the latest profiling."""
    for record in reversed(history.rounds):
        info = as_dict(record.get(TIFL))
        if "tiers" in info:
            return as_dict(info["tiers"]), as_dict(info.get("latency"))
    return {}, {}


def last_fairness(history: History) -> Fairness | None:
    """Return how good the model is on each node, as last measured; None if it never was."""
    record = next((record for record in reversed(history.rounds) if FAIRNESS in record), None)
    if record is None:
        return None
    info = as_dict(record[FAIRNESS])
    by_node = {name: as_number(value) for name, value in as_dict(info.get("by_node")).items()}
    # Without rounds, nodes evaluate the model of an earlier server update.
    evaluated_round = as_dict(record.get("evaluate")).get(EVALUATED, record["round"])
    return Fairness(
        round=int(evaluated_round),
        metric=str(info.get("metric", "accuracy")),
        nodes=int(info.get("nodes", len(by_node))),
        mean=as_number(info.get("mean")),
        worst=as_number(info.get("worst_tenth")),
        by_node=by_node,
    )


@lru_cache(2)
def slowest_nodes(history: History) -> list[str]:
    """Return the slowest fifth of the nodes by time per step, or by latency without steps.

    Nodes that take as many steps as fit a time slice differ in their steps more than in their time.
    """
    step_times: dict[str, list[float]] = defaultdict(list)
    for record in history.rounds:
        sections = [section for section in record.values() if isinstance(section, dict)]
        steps = next((as_dict(s["num_steps"]) for s in sections if "num_steps" in s), {})
        for name, seconds in as_dict(record.get("latency")).items():
            count = as_number(steps.get(name))
            if count > 0:
                step_times[name].append(as_number(seconds) / count)
    times = {name: median(values) for name, values in step_times.items()}
    times = times or {node.identity: node.typical_s for node in node_stats(history)}
    known = [name for name, seconds in times.items() if isfinite(seconds)]
    known.sort(key=lambda name: -times[name])
    return known[: ceil(SLOWEST * len(known))]


def mean_over_nodes(history: History, *choices: Sequence[str]) -> float:
    """Return the mean of what the first nodes that evaluated last measured; NaN if none did."""
    latest: dict[str, float] = {}
    for record in history.rounds:
        info = as_dict(record.get(FAIRNESS))
        values = as_dict(info.get("by_node"))
        # The table of a large fleet has its worst nodes only, which would lower the mean.
        if info.get("nodes", len(values)) == len(values):
            latest |= values
    numbers = [[as_number(latest[name]) for name in names if name in latest] for names in choices]
    return next((float(np.mean(values)) for values in numbers if values), nan)


@lru_cache(2)
def failure_groups(history: History) -> list[tuple[str, str, list[int]]]:
    """Return node, reason and rounds of failures, the most frequent failure first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in history.rounds:
        for failure in record.get("failures") or ():
            groups[str(failure["node"]), str(failure["reason"])].append(record["round"])
    failures = [(node, reason, rounds) for (node, reason), rounds in groups.items()]
    return sorted(failures, key=lambda failure: (-len(failure[2]), _natural(failure[0])))


def _natural(identity: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts node-2 before node-10."""
    parts = re.split(r"(\d+)", identity)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]
