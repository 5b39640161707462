"""What a history knows of nodes, tiers and failures."""

import re
from collections import Counter, defaultdict
from functools import lru_cache
from math import nan
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


class NodeStats(NamedTuple):
    """One node over a run; ``lost`` counts rounds in which its training reply did not count."""

    identity: str
    tier: int | None
    selected: int
    lost: int
    typical_s: float
    """Median of its latencies, or the profiled one; NaN if both are unknown."""


class Fairness(NamedTuple):
    """How good the model of a round is on each node, as last measured."""

    round: int
    metric: str
    nodes: int
    mean: float
    worst: float
    """Mean of the worst tenth of the nodes; ``by_node`` has the worst ones of a large fleet."""
    by_node: dict[str, float]


@lru_cache(2)
def node_stats(history: History) -> list[NodeStats]:
    """Collect what is known of each node, sorted by tier, then latency."""
    tiers, profiled = latest_tiers(history)
    selected, lost = Counter[str](), Counter[str]()
    latency: dict[str, list[float]] = defaultdict(list)
    for record in history.rounds:
        asked = record.get("selected") or ()
        failed = {failure["node"] for failure in record.get("failures") or ()}
        selected.update(asked)
        # Evaluation has failures too: lost is who was to train, and whose reply did not count.
        lost.update((failed & {*asked}) - {*(record.get("latency") or ())})
        for name, seconds in as_dict(record.get("latency")).items():
            latency[name] += [] if seconds is None else [seconds]
    names = sorted({*tiers, *profiled, *selected, *latency}, key=_natural)
    tier = [as_number(tiers.get(name)) for name in names]
    typical = {n: float(median(latency[n] or [as_number(profiled.get(n))])) for n in names}
    # NaN comes last
    order = [names[place] for place in np.lexsort([[*typical.values()], tier])]
    return [NodeStats(n, tiers.get(n), selected[n], lost[n], typical[n]) for n in order]


@lru_cache(2)
def message_parts(history: History) -> dict[str, Floats]:
    """Return the median seconds of a message by part, NaN if unknown; the quickest node first."""
    known: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in history.rounds:
        seconds = as_dict(record.get(SECONDS))
        for part in PARTS:
            for name, value in as_dict(seconds.get(part)).items():
                if value is not None:
                    known[name][part].append(as_number(value))
    found = {n: np.array([median(own.get(p, [nan])) for p in PARTS]) for n, own in known.items()}
    ordered = sorted(found.items(), key=lambda item: (np.nansum(item[1]), _natural(item[0])))
    return dict(ordered)


def latest_tiers(history: History) -> tuple[dict[str, int], dict[str, float | None]]:
    """Return tier and latency of each node in the latest profiling."""
    infos = (as_dict(record.get(TIFL)) for record in reversed(history.rounds))
    info = next((info for info in infos if "tiers" in info), {})
    return as_dict(info.get("tiers")), as_dict(info.get("latency"))


@lru_cache(2)
def num_tiers(history: History) -> int:
    """Return how many tiers a run has or had; 0 without TiFL."""
    counts = [len(as_dict(r.get(TIFL)).get("tier_probs") or ()) for r in history.rounds]
    return max([0, *counts, *(1 + tier for tier in latest_tiers(history)[0].values())])


def last_fairness(history: History) -> Fairness | None:
    """Return how good the model is on each node, as last measured; None if it was not."""
    record = next((record for record in reversed(history.rounds) if FAIRNESS in record), None)
    if record is None:
        return None
    info, metrics = as_dict(record[FAIRNESS]), as_dict(record.get("evaluate"))
    mean, worst = (as_number(info.get(key)) for key in ("mean", "worst_tenth"))
    by_node = {name: as_number(value) for name, value in as_dict(info.get("by_node")).items()}
    # Of a server update the nodes evaluated an earlier model: figures are of that one.
    number = int(metrics.get(EVALUATED, record["round"]))
    nodes = int(info.get("nodes", len(by_node)))
    return Fairness(number, str(info.get("metric", "accuracy")), nodes, mean, worst, by_node)


@lru_cache(2)
def failure_groups(history: History) -> list[tuple[str, str, list[int]]]:
    """Group failures by node and reason, with their rounds, most frequent first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in history.rounds:
        for failure in record.get("failures") or ():
            groups[str(failure["node"]), str(failure["reason"])].append(record["round"])
    found = [(*key, rounds) for key, rounds in groups.items()]
    return sorted(found, key=lambda group: (-len(group[2]), _natural(group[0])))


def _natural(identity: str) -> list[tuple[int, int | str]]:
    """Make a sort key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", identity)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]
