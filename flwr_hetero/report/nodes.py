"""What a history knows of nodes, tiers and failures."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import (
    EVALUATED,
    FAIRNESS,
    FEDBUFF,
    TIFL,
    Floats,
    History,
    as_dict,
    as_number,
)


class NodeStats(NamedTuple):
    """One node over a run; ``lost`` counts rounds in which its training reply did not count."""

    identity: str
    tier: int | None
    profiled_s: float
    latency_s: Floats
    selected: int
    lost: int
    typical_s: float
    """Median of its latencies, or the profiled one; NaN if both are unknown."""
    staleness: float
    """Mean of its replies, where no node waits; else NaN."""


class Fairness(NamedTuple):
    """How good the model is on each node, as last measured, and the last round of these."""

    round: int
    metric: str
    nodes: int
    mean: float
    worst: float
    """Mean of the worst tenth of the nodes."""
    by_node: dict[str, float]
    """Of a large fleet the worst ones."""


def node_stats(history: History) -> list[NodeStats]:
    """Collect what is known of each node, sorted by tier, then latency."""
    tiers, profiled = latest_tiers(history)
    selected, lost = Counter[str](), Counter[str]()
    latency: dict[str, list[float]] = defaultdict(list)
    stale: dict[str, list[float]] = defaultdict(list)
    for record in history.rounds:
        asked = record.get("selected") or ()
        failed = {failure.get("node") for failure in record.get("failures") or ()}
        selected.update(asked)
        # Evaluation has failures too: lost is who was to train, and whose reply did not count.
        lost.update((failed & {*asked}) - {*(record.get("latency") or ())})
        for name, seconds in as_dict(record.get("latency")).items():
            latency[name] += [] if seconds is None else [seconds]
        merged = as_dict(record.get(FEDBUFF))
        pairs = zip(merged.get("nodes") or (), merged.get("staleness") or (), strict=False)
        for name, behind in pairs:
            stale[name] += [] if behind is None else [behind]
    nodes = [
        NodeStats(
            identity=name,
            tier=tiers.get(name),
            profiled_s=as_number(profiled.get(name)),
            latency_s=np.array(latency[name], np.float64),
            selected=selected[name],
            lost=lost[name],
            typical_s=float(median(latency[name] or [as_number(profiled.get(name))])),
            staleness=float(np.mean(stale[name])) if stale[name] else np.nan,
        )
        for name in sorted({*tiers, *profiled, *selected, *latency}, key=_natural)
    ]
    tier, typical = [as_number(node.tier) for node in nodes], [node.typical_s for node in nodes]
    return [nodes[place] for place in np.lexsort([typical, tier])]  # NaN comes last


def latest_tiers(history: History) -> tuple[dict[str, int], dict[str, float | None]]:
    """Return tier and latency of each node in the latest profiling."""
    infos = (as_dict(record.get(TIFL)) for record in reversed(history.rounds))
    info = next((info for info in infos if "tiers" in info), {})
    return as_dict(info.get("tiers")), as_dict(info.get("latency"))


def num_tiers(history: History) -> int:
    """Return how many tiers a run has or had; 0 without TiFL."""
    counts = [len(as_dict(r.get(TIFL)).get("tier_probs") or ()) for r in history.rounds]
    return max([0, *counts, *(1 + tier for tier in latest_tiers(history)[0].values())])


def last_fairness(history: History) -> Fairness | None:
    """Return how good the model is on each node, as last measured; None if nodes did not evaluate.

    Where a round asks some of the nodes, those of the last half of the run count.
    """
    found = [one for one in map(_fairness, history.rounds) if one]
    if not found:
        return None
    last = found[-1]
    latest: dict[str, float] = {}
    for one in found:
        if one.round >= last.round / 2 and one.metric == last.metric:
            latest |= one.by_node
    # A large fleet's line names its worst nodes only: then its own figures count.
    if len(last.by_node) < last.nodes or len(latest) <= last.nodes:
        return last
    worst_first = sorted(latest.values(), reverse="acc" not in last.metric.lower())
    mean, worst = np.mean(worst_first), np.mean(worst_first[: -(-len(latest) // 10)])
    return Fairness(last.round, last.metric, len(latest), float(mean), float(worst), latest)


def _fairness(record: Mapping[str, Any]) -> Fairness | None:
    """Return what a record says of the nodes; None if some figures are missing."""
    info = as_dict(record.get(FAIRNESS))
    values = {name: as_number(value) for name, value in as_dict(info.get("by_node")).items()}
    mean, worst = as_number(info.get("mean")), as_number(info.get("worst_tenth"))
    if not values or np.isnan([mean, worst, *values.values()]).any():
        return None
    # Of a server update the nodes evaluated an earlier model: figures are of that one.
    number = int(as_dict(record.get("evaluate")).get(EVALUATED, record["round"]))
    count = int(as_number(info.get("nodes", len(values))))
    return Fairness(number, str(info.get("metric", "accuracy")), count, mean, worst, values)


def busy_s(history: History) -> Floats:
    """Return how long nodes were at work in each round; in rounds by the replies that counted."""
    busy = history.column("device_s")
    if not np.isnan(busy).all():
        return np.nan_to_num(busy)
    rows = (as_dict(record.get("latency")).values() for record in history.rounds)
    return np.array([sum(s for s in map(as_number, row) if isfinite(s)) for row in rows])


def failure_groups(history: History) -> list[tuple[str, str, list[int]]]:
    """Group failures by node and reason, with their rounds, most frequent first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in history.rounds:
        for failure in record.get("failures") or ():
            groups[str(failure.get("node")), str(failure.get("reason"))].append(record["round"])
    found = [(*key, rounds) for key, rounds in groups.items()]
    return sorted(found, key=lambda group: (-len(group[2]), _natural(group[0])))


def _natural(identity: str) -> list[tuple[int, int | str]]:
    """Make a sort key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", identity)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]
