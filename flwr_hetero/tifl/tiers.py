r"""Tiers of similar latency (section 4.2), on NumPy arrays, and which node is in which.

    histogram of the latencies, split into m groups      quantile_tiers: of equal size
    clients of a group form a tier                       Tiers, place
    the average response latency of each group           Tiering.latency: the median

Latencies are in seconds. Beyond the paper are ``speeds_differ`` and ``censored_latency``.
"""

import json
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from logging import DEBUG, INFO, WARNING
from typing import NamedTuple
from zlib import crc32

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.records import read_number
from flwr_hetero.server.profiling import EQUAL_S
from flwr_hetero.tifl.algorithm import Available, Floats

SAME = 2.0
"""Without repeated measurements nodes are equally fast if the slowest takes less than this many
times as long as the fastest."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""
T_MAX = 600.0
"""Seconds after which a node that has not answered is given up, the paper's T_max."""
PANEL = 10
"""Nodes of each tier whose accuracy is that of the tier."""


class Tiering(NamedTuple):
    """Tier of each node: (num_nodes,), -1 without latency; between tiers and of each, seconds."""

    tier: NDArray[np.int64]
    boundaries: Floats
    latency: Floats


def quantile_tiers(latency: Floats, num_tiers: int) -> Tiering:
    """Cut the sorted nodes into tiers of equal size; nodes of equal latency share a tier.

    latency: (num_nodes,), NaN for a dropout -> min(num_tiers, different latencies) tiers.

    >>> quantile_tiers(np.array([0.5, 8.0, 1.0, 7.0, np.nan]), num_tiers=2)
    Tiering(tier=array([ 0,  1,  0,  1, -1]), boundaries=array([4.]), latency=array([0.75, 7.5 ]))
    """
    check_count("num_tiers", num_tiers, 1)
    ordered = np.sort(latency[~np.isnan(latency)])
    if not len(ordered) or ordered[0] < 0 or np.isinf(ordered[-1]):
        raise invalid("latency", latency, "hold finite seconds, or NaN for a dropout")
    changes = np.flatnonzero(np.diff(ordered)) + 1  # positions that separate no equal latencies
    cuts: list[int] = []
    first, begin = 0, 0  # first change that is free, first node of the current tier
    for remaining in range(min(num_tiers - 1, len(changes)), 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        free = changes[first : len(changes) - remaining + 1]  # leaves one for each later cut
        nearest = int(np.abs(free - ideal).argmin())
        first, begin = first + nearest + 1, int(free[nearest])
        cuts.append(begin)
    at = np.array(cuts, np.int64)
    # a boundary lies midway between the slowest of a tier and the fastest of the next
    slowest, fastest = ordered[at - 1], ordered[at]
    middle = slowest + (fastest - slowest) / 2
    boundaries = np.where(middle < fastest, middle, slowest)  # neighbouring floats have no middle
    median = np.array([np.median(part) for part in np.split(ordered, at)])
    return Tiering(place(latency, boundaries), boundaries, median)


def place(latency: Floats, boundaries: Floats) -> NDArray[np.int64]:
    """Return the tiers of latencies: (any,), (num_tiers - 1,) -> (any,), -1 for NaN.

    >>> place(np.array([0.1, 4.0, 99.0, np.nan]), boundaries=np.array([4.0]))
    array([ 0,  0,  1, -1])
    """
    return np.where(np.isnan(latency), -1, np.searchsorted(boundaries, latency))


def speeds_differ(rounds: Floats) -> bool:
    r"""Return whether latencies differ more between nodes than from time to time on one node.

    .. math:: \hat\sigma^2_{between} > \hat\sigma^2_{within} \text{ of } \log l_{r,i}

    These are the variance components of a one-way analysis of variance. With fewer than
    ``MIN_REPEATS`` repeated measurements in all, the slowest node must take at least ``SAME``
    times as long as the fastest.

    rounds: (num_measurements, num_nodes), NaN for none.

    >>> noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((3, 10)))
    >>> speeds_differ(noise), speeds_differ(noise * np.linspace(1, 4, 10))
    (False, True)
    """
    logs = np.log(np.maximum(rounds, 1e-9))  # a clock may be too coarse to see any time
    count = np.sum(~np.isnan(logs), axis=0)
    logs, count = logs[:, count > 0], count[count > 0]
    total, groups = count.sum(), len(count)
    if groups < 2:
        return False
    mean = np.nansum(logs, axis=0) / count
    if total - groups < MIN_REPEATS:
        return bool(np.ptp(mean) >= np.log(SAME))
    within = np.nansum((logs - mean) ** 2) / (total - groups)
    around = mean - (count @ mean) / total
    typical = (total - (count**2).sum() / total) / (groups - 1)
    between = (count @ around**2 / (groups - 1) - within) / typical
    return bool(between > within)


def censored_latency(latency: Floats, at_least: Floats) -> Floats:
    """Append nodes that have not answered yet: slower than all that have, no two equally fast.

    latency: (num_timed,), at_least: (num_others,), how long they have been in flight -> both.

    >>> censored_latency(np.array([1.0, 4.0]), at_least=np.array([2.0, 9.0])).round(3)
    array([1., 4., 4., 9.])
    """
    bound = np.maximum(at_least, latency.max())
    return np.concatenate([latency, bound * (1 + 1e-6 * np.arange(1, len(bound) + 1))])


class Tiers:
    """Which node is in which tier, by stable identity.

    ``latency`` is that of all timed nodes, ``tier`` leaves out the dropouts, ``seconds`` are of
    the tiers.
    """

    def __init__(
        self, latency: dict[str, float], tier: dict[str, int], boundaries: Floats, seconds: Floats
    ) -> None:
        self.latency, self.tier = latency, tier
        self.boundaries, self.seconds = boundaries, seconds
        self.members: list[list[str]] = [[] for _ in range(len(boundaries) + 1)]
        for identity, number in tier.items():
            self.members[number].append(identity)
        self._panel: list[list[str]] | None = None

    def add(self, identity: str, latency_s: float) -> int:
        """Place a late joiner by the boundaries between the tiers."""
        tier = int(place(np.array([latency_s]), self.boundaries)[0])
        self.latency[identity], self.tier[identity] = latency_s, tier
        self.members[tier].append(identity)
        self._panel = None
        return tier

    def moved(self, before: "Tiers") -> bool:
        """Return whether a twentieth of the nodes, at least one, has another tier than before."""
        others = sum(before.tier.get(name) != tier for name, tier in self.tier.items())
        others += len(before.tier.keys() - self.tier.keys())
        fewer = len(self.members) != len(before.members)
        return fewer or others >= max(1, 0.05 * len(self.tier))

    def panel(self, available: Available) -> list[int]:
        """Return up to ``PANEL`` available nodes of every tier, the same each time if they are."""
        if self._panel is None:  # in an order that has nothing to do with their names
            key = lambda name: crc32(name.encode())  # noqa: E731
            self._panel = [nsmallest(2 * PANEL, names, key) for names in self.members]
        chosen = []
        for names in self._panel:
            chosen += [node for name in names if (node := available(name)) is not None][:PANEL]
        return chosen

    def accuracy(self, reported: Mapping[str, MetricRecord], weight_key: str) -> Floats:
        """Average the accuracy of each tier, weighted by examples (Alg. 2, l. 21-23)."""
        total, weight = np.zeros(len(self.members)), np.zeros(len(self.members))
        for identity, metrics in reported.items():
            accuracy, examples = accuracy_of(metrics), read_number(metrics, weight_key, 1)
            tier = self.tier.get(identity)
            if tier is not None and not np.isnan(accuracy):
                total[tier] += accuracy * examples
                weight[tier] += examples
        if reported and not weight.any():
            text = "TiFL: none of the evaluation's metrics %s has 'acc' or 'loss' in its name"
            log(WARNING, text, sorted(next(iter(reported.values()))))
        mean = np.full(len(self.members), np.nan)
        np.divide(total, weight, out=mean, where=weight > 0)
        return mean

    def info(self) -> dict[str, object]:
        """Return all, JSON-able, for the history."""
        return {
            "tiers": self.tier,
            "latency": self.latency,
            "boundaries": self.boundaries.tolist(),
            "dropouts": sorted(set(self.latency) - set(self.tier)),
            "num_tiers": len(self.members),
            "tier_latency": self.seconds.tolist(),
        }

    @classmethod
    def from_json(cls, text: str) -> "Tiers":
        """Restore what :meth:`info` has told, as JSON."""
        saved = json.loads(text)
        rows = (np.array(saved[name], np.float64) for name in ("boundaries", "tier_latency"))
        return cls(saved["latency"], saved["tiers"], *rows)


def accuracy_of(metrics: MetricRecord) -> float:
    """Read the metric that says how good the model is, more is better; NaN if there is none."""
    for part, sign in (("acc", 1.0), ("loss", -1.0)):
        for name in metrics:
            if part in name.lower():
                return sign * read_number(metrics, name)
    return np.nan


class Formed(NamedTuple):
    """Tiers of a fleet, and what they were made of: seconds, and the tier of each column.

    ``first`` where nodes have a tier for the first time, so that credits begin again.
    """

    tiers: Tiers
    rounds: Floats
    tier: NDArray[np.int64]
    remark: str = ""
    first: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether any latency is known, that is no simulation without reports."""
        return bool((self.rounds[~np.isnan(self.rounds)] != EQUAL_S).any())

    def log(self, num_in_flight: int) -> None:
        """Log the size of the tiers, and why there are so few."""
        if self.remark:
            log(WARNING, "TiFL: %s", self.remark)
        sizes = [len(members) for members in self.tiers.members]
        dropouts = len(self.tiers.latency) - sum(sizes)
        text = "TiFL: tiers of %s nodes, fastest first; %d nodes dropped out%s"
        late = f", {num_in_flight} have not answered yet" if num_in_flight else ""
        log(DEBUG if num_in_flight else INFO, text, sizes, dropouts, late)


def form_tiers(
    names: Sequence[str], rounds: Floats, num_tiers: int, in_flight: Sequence[float] = ()
) -> Formed | None:
    """Group nodes by latency (section 4.2); None if none has answered in time.

    rounds: (num_measurements, num_nodes), NaN for none; in_flight: for how long other nodes have
    not answered: they are slower.
    """
    timed_out = rounds >= T_MAX
    latency = np.nanmedian(np.minimum(rounds, T_MAX), axis=0)
    # 4.2: dropouts have timed out in every round
    dropout = (timed_out | np.isnan(rounds)).all(axis=0)
    rounds = np.where(timed_out, np.nan, rounds)
    if dropout.all():
        return None
    known, remark = np.where(dropout, np.nan, latency), ""
    if not in_flight and num_tiers > 1 and not speeds_differ(rounds[:, ~dropout]):
        num_tiers = 1
        fastest, slowest = np.nanmin(known), np.nanmax(known)
        remark = f"one tier: latencies ({fastest:.3g} to {slowest:.3g} s) differ by noise only"
        if fastest == slowest == EQUAL_S:
            remark = "one tier: in a simulation nodes must report their time, add the mod hetero"
    if in_flight:
        others = censored_latency(latency, np.array(in_flight))[len(names) :]
        known = np.concatenate([known, others])
        rounds = np.hstack([rounds, np.tile(others, (len(rounds), 1))])
    found = quantile_tiers(known, num_tiers)
    if len(found.latency) < num_tiers:
        remark = f"{len(found.latency)} tiers instead of {num_tiers}: the latencies allow no more"
    tier = dict(zip(names, found.tier.tolist(), strict=False))
    placed = {name: number for name, number in tier.items() if number >= 0}
    latencies = dict(zip(names, latency.tolist(), strict=True))
    tiers = Tiers(latencies, placed, found.boundaries, found.latency)
    return Formed(tiers, rounds, found.tier, remark)
