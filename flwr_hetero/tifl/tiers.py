r"""Tiers of similar latency (section 4.2), on NumPy arrays, and which node is in which.

    clients with L_i >= sync_rounds T_max are dropouts     form_tiers
    the histogram of latencies is split into m groups      quantile_tiers: of equal size
    the average response latency of each group             Tiers.seconds: the median

Latencies are in seconds. ``speeds_differ`` and nodes that have not answered yet are our own.
"""

from collections.abc import Sequence
from heapq import nsmallest
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.context import EQUAL_S
from flwr_hetero.tifl.algorithm import Available, Floats

T_MAX = 600.0
"""Seconds after which a node that has not answered is given up, the paper's T_max."""
SAME = 2.0
"""Without repeated measurements nodes are equally fast if the slowest takes less than this many
times as long as the fastest."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""
PANEL = 10
"""Nodes of each tier whose accuracy is that of the tier."""


def quantile_tiers(latency: Floats, num_tiers: int) -> tuple[Floats, Floats]:
    """Cut the sorted nodes into tiers of equal size; nodes of equal latency share a tier.

    latency: (num_nodes,), NaN for a dropout -> between min(num_tiers, different latencies) tiers,
    (num_tiers - 1,), and of each, (num_tiers,).

    >>> quantile_tiers(np.array([0.5, 8.0, 1.0, 7.0, np.nan]), num_tiers=2)
    (array([4.]), array([0.75, 7.5 ]))
    """
    check_count("num_tiers", num_tiers, 1)
    ordered = np.sort(latency[~np.isnan(latency)])
    if not len(ordered) or ordered[0] < 0 or np.isinf(ordered[-1]):
        raise invalid("latency", latency, "hold finite seconds, or NaN for a dropout")
    # positions that separate no equal latencies
    changes = np.flatnonzero(np.diff(ordered)) + 1
    cuts: list[int] = []
    # first change that is free, first node of the current tier
    first, begin = 0, 0
    for remaining in range(min(num_tiers - 1, len(changes)), 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        free = changes[first : len(changes) - remaining + 1]  # leaves one for each later cut
        nearest = int(np.abs(free - ideal).argmin())
        first, begin = first + nearest + 1, int(free[nearest])
        cuts.append(begin)
    at = np.array(cuts, np.int64)
    # a boundary lies midway between two nodes, if neighbouring floats have a middle
    slowest, fastest = ordered[at - 1], ordered[at]
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
    # a clock may be too coarse to see any time
    logs = np.log(np.maximum(rounds, 1e-9))
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


def expected_slowest(latency: Floats, num_selected: int) -> float:
    r"""Compute the expected latency of the slowest of c nodes drawn without replacement.

    .. math:: E[\max] = \sum_{k=c}^{n} l_{(k)} \binom{k-1}{c-1} / \binom{n}{c}

    """
    # F(k), that only the k fastest are drawn: F(n) = 1, F(k-1) = F(k) (1 - c/k); l_(k) weighs
    # F(k) c / k, and sums of log1p neither overflow nor cancel
    ordered = np.sort(latency)
    c = min(num_selected, len(ordered))
    k = np.arange(len(ordered), c, -1)  # slowest first
    log_f = np.concatenate([[0.0], np.cumsum(np.log1p(-c / k))])
    weights = np.exp(log_f) * c / np.append(k, c)
    return float(weights @ ordered[c - 1 :][::-1])


def expected_round_times(rounds: Floats, tier: NDArray[np.int64], count: int) -> Floats:
    """Compute the expected length of a round of each tier, as a mean over measured rounds.

    rounds: (num_measurements, num_nodes), tier: (num_nodes,) -> (num_tiers,).
    """
    # right with jitter too: within a round latencies are as independent as in a training round
    members = [rounds[:, tier == j] for j in range(tier.max() + 1)]
    return np.array([np.mean([expected_slowest(row, count) for row in m]) for m in members])


class Tiers:
    """Which node is in which tier, by stable identity; ``latency`` has the dropouts, too.

    Of each tier ``seconds`` is the median; of its rounds with |C| nodes ``slowest_s`` and
    ``slowest_s2`` are mean and mean square, empty where no node reports its time.
    """

    def __init__(
        self,
        latency: dict[str, float],
        tier: dict[str, int],
        boundaries: ArrayLike = (),
        seconds: ArrayLike = (),
        slowest_s: ArrayLike = (),
        slowest_s2: ArrayLike = (),
    ) -> None:
        self.latency, self.tier = latency, tier
        self.boundaries, self.seconds = np.array(boundaries), np.array(seconds)
        self.slowest_s, self.slowest_s2 = np.array(slowest_s), np.array(slowest_s2)
        self.members: list[list[str]] = [[] for _ in range(len(self.boundaries) + 1)]
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
        if self._panel is None:
            order = {name: crc32(name.encode()) for name in self.tier}
            self._panel = [nsmallest(2 * PANEL, names, order.__getitem__) for names in self.members]
        found = [
            [node for name in names if (node := available(name)) is not None]
            for names in self._panel
        ]
        return [node for nodes in found for node in nodes[:PANEL]]

    def info(self) -> dict[str, object]:
        """Return all, JSON-able, for the history."""
        return {
            "tiers": self.tier,
            "latency": self.latency,
            "boundaries": self.boundaries.tolist(),
            "dropouts": sorted(set(self.latency) - set(self.tier)),
            "num_tiers": len(self.members),
        }


def form_tiers(
    names: Sequence[str],
    rounds: Floats,
    num_tiers: int,
    count: int,
    in_flight: Sequence[float] = (),
) -> tuple[Tiers, str] | None:
    """Group nodes by latency (section 4.2); None if none has answered in time.

    rounds: (num_measurements, num_nodes), NaN for none; count: nodes |C| of a round; in_flight: for
    how long other nodes have not answered yet: they are slower than all that have, no two equally
    fast -> the tiers, and why there are so few.

    >>> tiers, _ = form_tiers(["a", "b"], np.array([[1.0, 4.0]]), 3, count=1, in_flight=[2.0])
    >>> tiers.tier, tiers.boundaries.round(3)
    ({'a': 0, 'b': 1}, array([2.5, 4. ]))
    """
    latency, why = np.nanmedian(np.minimum(rounds, T_MAX), axis=0), ""
    rounds = np.where(rounds < T_MAX, rounds, np.nan)
    # 4.2: dropouts have timed out in every round
    dropout = np.isnan(rounds).all(axis=0)
    if dropout.all():
        return None
    known = np.where(dropout, np.nan, latency)
    if not in_flight and num_tiers > 1 and not speeds_differ(rounds[:, ~dropout]):
        num_tiers = 1
        fastest, slowest = np.nanmin(known), np.nanmax(known)
        why = f"one tier: latencies ({fastest:.3g} to {slowest:.3g} s) differ by noise only"
        if fastest == slowest == EQUAL_S:
            why = "one tier: in a simulation nodes must report their time, add the mod hetero"
    if in_flight:
        least = np.maximum(in_flight, latency.max())
        others = least * (1 + 1e-6 * np.arange(1, len(least) + 1))
        known = np.concatenate([known, others])
        rounds = np.hstack([rounds, np.tile(others, (len(rounds), 1))])
    boundaries, seconds = quantile_tiers(known, num_tiers)
    if len(seconds) < num_tiers:
        why = f"{len(seconds)} tiers instead of {num_tiers}: the latencies allow no more"
    tier = place(known, boundaries)
    own = zip(names, tier.tolist(), strict=False)
    latencies = dict(zip(names, latency.tolist(), strict=True))
    tiers = Tiers(latencies, {name: j for name, j in own if j >= 0}, boundaries, seconds)
    if (rounds[~np.isnan(rounds)] != EQUAL_S).any():
        typical = np.nanmedian(np.where(tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        tiers.slowest_s, tiers.slowest_s2 = (
            expected_round_times(filled**power, tier, count) for power in (1, 2)
        )
    return tiers, why
