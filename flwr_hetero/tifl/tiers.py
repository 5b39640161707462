"""Tiers of similar latency in seconds (section 4.2), and what their rounds cost (section 4.5).

The paper's histogram is split into groups of equal size, and the median of a group stands for its
mean. ``speeds_differ`` and nodes that have not answered yet are our own.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from logging import WARNING
from zlib import crc32

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import ArrayLike, NDArray

from flwr_hetero._flwr import log
from flwr_hetero.exchange.context import EQUAL_S
from flwr_hetero.records import read_number
from flwr_hetero.tifl.algorithm import Available, Floats

T_MAX = 600.0
"""Seconds after which a node that has not answered is given up, the paper's T_max."""
SAME = 2.0
"""Nodes timed once are equally fast if the slowest takes less than so many times the fastest's."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""
PANEL = 10
"""Nodes of each tier that evaluate where the wrapped strategy does not."""


def quantile_tiers(latency: Floats, num_tiers: int) -> tuple[Floats, Floats]:
    """Cut the sorted nodes into tiers of equal size; nodes of equal latency share a tier.

    latency: (num_nodes,), NaN for a dropout -> between min(num_tiers, different latencies) tiers,
    (num_tiers - 1,), and of each, (num_tiers,).

    >>> quantile_tiers(np.array([0.5, 8.0, 1.0, 7.0, np.nan]), num_tiers=2)
    (array([4.]), array([0.75, 7.5 ]))
    """
    ordered = np.sort(latency[~np.isnan(latency)])
    # These are positions that separate no equal latencies.
    changes = np.flatnonzero(np.diff(ordered)) + 1
    cuts: list[int] = []
    # The first change that is free, and the first node of the current tier.
    first = 0
    begin = 0
    for remaining in range(min(num_tiers - 1, len(changes)), 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        # This leaves one for each later cut.
        free = changes[first : len(changes) - remaining + 1]
        nearest = int(np.abs(free - ideal).argmin())
        first = first + nearest + 1
        begin = int(free[nearest])
        cuts.append(begin)
    at = np.array(cuts, np.int64)
    # A boundary lies midway between two nodes, unless they are neighbouring floats.
    slowest = ordered[at - 1]
    fastest = ordered[at]
    middle = slowest + (fastest - slowest) / 2
    median = np.array([np.median(part) for part in np.split(ordered, at)])
    return np.where(middle < fastest, middle, slowest), median


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
    # A clock may be too coarse to measure any time.
    logs = np.log(np.maximum(rounds, 1e-9))
    count = np.sum(~np.isnan(logs), axis=0)
    logs = logs[:, count > 0]
    count = count[count > 0]
    total = count.sum()
    groups = len(count)
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


def expected_slowest(latency: Floats, num_selected: int) -> float:
    r"""Compute the expected latency of the slowest of c nodes drawn without replacement.

    .. math:: E[\max] = \sum_{k=c}^{n} l_{(k)} \binom{k-1}{c-1} / \binom{n}{c}

    >>> round(expected_slowest(np.array([1.0, 2.0, 6.0]), num_selected=2), 9)
    4.666666667
    """
    # F(k), that only the k fastest are drawn: F(n) = 1, F(k-1) = F(k) (1 - c/k); l_(k) weighs
    # F(k) c / k, and sums of log1p neither overflow nor cancel
    ordered = np.sort(latency)
    c = min(num_selected, len(ordered))
    # The slowest node comes first.
    k = np.arange(len(ordered), c, -1)
    log_f = np.concatenate([[0.0], np.cumsum(np.log1p(-c / k))])
    weights = np.exp(log_f) * c / np.append(k, c)
    return float(weights @ ordered[c - 1 :][::-1])


def expected_round_times(rounds: Floats, tier: NDArray[np.int64], count: int) -> Floats:
    """Compute the expected length of a round of each tier, as a mean over measured rounds.

    rounds: (num_measurements, num_nodes), tier: (num_nodes,) -> (num_tiers,).
    """
    # This holds with jitter, because latencies are as independent as in a round of training.
    members = [rounds[:, tier == j] for j in range(tier.max() + 1)]
    return np.array([np.mean([expected_slowest(row, count) for row in m]) for m in members])


def paper_estimate(tier_latency: Floats, tier_probs: Floats, num_rounds: int) -> float:
    r"""Estimate the training time from one latency per tier (Eq. 6).

    .. math:: L_{all} = \sum_i L_{tier_i} P_i R

    A round lasts as long as its slowest node, so that this is too low where latencies within a
    tier differ.
    """
    return float(np.dot(tier_latency, tier_probs)) * num_rounds


class Tiers:
    """Which node is in which tier, by stable identity; ``latency`` has the dropouts, too.

    Of each tier ``seconds`` is the median, ``slowest_s`` the mean length of its rounds with |C|
    nodes, empty where no node reports its time.
    """

    why_so_few = ""

    def __init__(
        self,
        latency: dict[str, float],
        tier: dict[str, int],
        boundaries: ArrayLike = (),
        seconds: ArrayLike = (),
        slowest_s: ArrayLike = (),
    ) -> None:
        self.latency = latency
        self.tier = tier
        self.boundaries = np.array(boundaries)
        self.seconds = np.array(seconds)
        self.slowest_s = np.array(slowest_s)
        self.members: list[list[str]] = [[] for _ in range(len(self.boundaries) + 1)]
        for identity, number in tier.items():
            self.members[number].append(identity)

    @property
    def sizes(self) -> Floats:
        """Number of nodes of each tier; at least 1, for some may be in flight."""
        return np.array([max(1.0, len(names)) for names in self.members])

    def add(self, identity: str, latency_s: float) -> int:
        """Place a late joiner by the boundaries between the tiers."""
        tier = int(place(np.array([latency_s]), self.boundaries)[0])
        self.latency[identity] = latency_s
        self.tier[identity] = tier
        self.members[tier].append(identity)
        return tier

    def moved(self, before: "Tiers") -> bool:
        """Return whether a twentieth of the nodes, at least one, has another tier than before."""
        others = sum(before.tier.get(name) != tier for name, tier in self.tier.items())
        others += len(before.tier.keys() - self.tier.keys())
        fewer = len(self.members) != len(before.members)
        return fewer or others >= max(1, 0.05 * len(self.tier))

    def panel(self, available: Available) -> list[int]:
        """Return up to ``PANEL`` available nodes of every tier, the same each time if they are."""
        chosen: list[int] = []
        for names in self.members:
            first = nsmallest(2 * PANEL, names, lambda name: crc32(name.encode()))
            chosen += [node for name in first if (node := available(name)) is not None][:PANEL]
        return chosen

    def accuracy(self, reported: Mapping[str, MetricRecord], weight_key: str) -> Floats:
        """Average the reported accuracy of each tier (Alg. 2, l. 22), weighted by examples.

        reported: by identity -> (num_tiers,), NaN where unknown.
        """
        total, weight = np.zeros((2, len(self.members)))
        for name, metrics in reported.items():
            accuracy = accuracy_of(metrics)
            examples = read_number(metrics, weight_key, 1)
            if name in self.tier and not np.isnan(accuracy):
                total[self.tier[name]] += accuracy * examples
                weight[self.tier[name]] += examples
        if reported and not weight.any():
            text = "TiFL: none of the evaluation's metrics %s has 'acc' or 'loss' in its name"
            log(WARNING, text, sorted(next(iter(reported.values()))))
        with np.errstate(invalid="ignore"):
            return np.asarray(total / weight)


def accuracy_of(metrics: MetricRecord) -> float:
    """Read the metric that says how good the model is, more is better; NaN if it says nothing."""
    for part, sign in (("acc", 1.0), ("loss", -1.0)):
        for name in metrics:
            if part in name.lower():
                return sign * read_number(metrics, name)
    return np.nan


def form_tiers(
    names: list[str], rounds: Floats, num_tiers: int, count: int, in_flight: Sequence[float] = ()
) -> Tiers | None:
    """Group nodes by latency (section 4.2); None if none has answered in time.

    rounds: (num_measurements, num_nodes), NaN for none; count: nodes |C| of a round; in_flight: for
    how long other nodes have not answered yet: they are slower than all that have, no two equally
    fast.

    >>> tiers = form_tiers(["a", "b"], np.array([[1.0, 4.0]]), 3, count=1, in_flight=[2.0])
    >>> tiers.tier, tiers.boundaries.round(3)
    ({'a': 0, 'b': 1}, array([2.5, 4. ]))
    """
    latency = np.nanmedian(np.minimum(rounds, T_MAX), axis=0)
    rounds = np.where(rounds < T_MAX, rounds, np.nan)
    # 4.2: dropouts have timed out in every round
    dropout = np.isnan(rounds).all(axis=0)
    if dropout.all():
        return None
    known = np.where(dropout, np.nan, latency)
    why = ""
    if not in_flight and num_tiers > 1 and not speeds_differ(rounds[:, ~dropout]):
        num_tiers = 1
        why = _why_one_tier(np.nanmin(known), np.nanmax(known))
    if in_flight:
        least = np.maximum(in_flight, latency.max())
        others = least * (1 + 1e-6 * np.arange(1, len(least) + 1))
        known = np.concatenate([known, others])
        rounds = np.hstack([rounds, np.tile(others, (len(rounds), 1))])
    boundaries, seconds = quantile_tiers(known, num_tiers)
    if len(seconds) < num_tiers:
        why = f"{len(seconds)} tiers instead of {num_tiers}: the latencies allow no more"
    tier = place(known, boundaries)
    own = {name: j for name, j in zip(names, tier.tolist(), strict=False) if j >= 0}
    tiers = Tiers(dict(zip(names, latency.tolist(), strict=True)), own, boundaries, seconds)
    tiers.why_so_few = why
    if (rounds[~np.isnan(rounds)] != EQUAL_S).any():
        typical = np.nanmedian(np.where(tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        tiers.slowest_s = expected_round_times(filled, tier, count)
    return tiers


def _why_one_tier(fastest: float, slowest: float) -> str:
    if fastest == slowest == EQUAL_S:
        return "one tier: in a simulation nodes must report their time, add the mod hetero"
    return f"one tier: latencies ({fastest:.3g} to {slowest:.3g} s) differ by noise only"
