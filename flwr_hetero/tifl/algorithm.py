r"""TiFL (Chai et al., HPDC 2020) on NumPy arrays, in the order of the paper.

    4.2      latency, dropouts <- profiling rounds     grouping.median_latency
             tiers <- latency                          histogram_tiers, quantile_tiers, place
    4.3      Table 1: static policies                  policy_probs, resample
    Alg. 2   l. 1     credits of each tier             spread_over
             l. 3-7   NewProbs <- ChangeProbs(A)       update_probs, change_probs
             l. 8-14  draw a tier that has credits     draw_tier, refund
    4.6      sampling rates q_j                        sampling_rates

Tier 0 is the fastest. Latencies are in seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import check_choice, check_count, invalid

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

# --- Section 4.2: profiling and tiering --------------------------------------------------------


class Tiering(NamedTuple):
    """Tier of each node: (num_nodes,), -1 without latency; between tiers and of each, seconds.

    >>> Tiering(np.array([0, 1, 0, -1]), np.array([4.0]), np.array([0.5, 8.0])).sizes
    array([2, 1])
    """

    tier: NDArray[np.int64]
    boundaries: Floats
    latency: Floats

    @property
    def num_tiers(self) -> int:
        """Number of tiers, none of them empty."""
        return len(self.latency)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Nodes per tier: (num_tiers,)."""
        return np.bincount(self.tier[self.tier >= 0], minlength=self.num_tiers)


def histogram_tiers(latency: Floats, num_tiers: int) -> Tiering:
    """Group latencies by a histogram of equal bins (the paper's rule); empty bins are dropped.

    latency: (num_nodes,), NaN for a dropout -> 1 to num_tiers tiers.

    Where latency is in proportion to 1 / CPU share, as in the paper, most nodes share a bin:

    >>> histogram_tiers(1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10), num_tiers=5).sizes
    array([40, 10])
    """
    ordered = _sorted(latency, num_tiers)
    edges = np.linspace(ordered[0], ordered[-1], num_tiers + 1)
    cuts = np.unique(np.searchsorted(ordered, edges[1:-1]))
    return _cut(latency, ordered, cuts[(cuts > 0) & (cuts < len(ordered))])


def quantile_tiers(latency: Floats, num_tiers: int) -> Tiering:
    """Cut the sorted nodes into tiers of equal size; nodes of equal latency share a tier.

    latency: (num_nodes,), NaN for a dropout -> min(num_tiers, different latencies) tiers.

    >>> quantile_tiers(np.array([0.5, 8.0, 1.0, 7.0, np.nan]), num_tiers=2)
    Tiering(tier=array([ 0,  1,  0,  1, -1]), boundaries=array([4.]), latency=array([0.75, 7.5 ]))
    """
    ordered = _sorted(latency, num_tiers)
    changes = np.flatnonzero(np.diff(ordered)) + 1  # positions that separate no equal latencies
    num_cuts = min(num_tiers - 1, len(changes))
    cuts: list[int] = []
    first, begin = 0, 0  # first change that is free, first node of the current tier
    for remaining in range(num_cuts, 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        free = changes[first : len(changes) - remaining + 1]  # leaves one for each later cut
        nearest = int(np.abs(free - ideal).argmin())
        first, begin = first + nearest + 1, int(free[nearest])
        cuts.append(begin)
    return _cut(latency, ordered, np.array(cuts, np.int64))


def place(latency: Floats, boundaries: Floats) -> NDArray[np.int64]:
    """Return the tiers of latencies: (any,), (num_tiers - 1,) -> (any,), -1 for NaN.

    >>> place(np.array([0.1, 4.0, 99.0, np.nan]), boundaries=np.array([4.0]))
    array([ 0,  0,  1, -1])
    """
    return np.where(np.isnan(latency), -1, np.searchsorted(boundaries, latency))


def _sorted(latency: Floats, num_tiers: int) -> Floats:
    check_count("num_tiers", num_tiers, 1)
    ordered = np.sort(latency[~np.isnan(latency)])
    if not len(ordered) or ordered[0] < 0 or np.isinf(ordered[-1]):
        raise invalid("latency", latency, "hold finite seconds, or NaN for a dropout")
    return ordered


def _cut(latency: Floats, ordered: Floats, cuts: NDArray[np.int64]) -> Tiering:
    """Begin a tier at each cut of the sorted latencies; boundaries lie midway between nodes."""
    slowest, fastest = ordered[cuts - 1], ordered[cuts]
    middle = slowest + (fastest - slowest) / 2
    boundaries = np.where(middle < fastest, middle, slowest)  # neighbouring floats have no middle
    median = np.array([np.median(part) for part in np.split(ordered, cuts)])
    return Tiering(place(latency, boundaries), boundaries, median)


# --- Section 4.3: static policies --------------------------------------------------------------

VANILLA = "vanilla"
"""No tiers: one tier with every node."""
PACED = "paced"
"""As many rounds for each tier as its speed earns, in every period: ``pacing.paced_credits``."""
ALGORITHM_2 = "algorithm-2"
"""Algorithm 2 with the ranks of ``change_probs``, which begins with equal probabilities."""
ADAPTIVE = "adaptive"
"""Probabilities by error and latency: ``pacing.weigh_tiers``."""
STATIC_POLICIES: dict[str, tuple[float, ...]] = {
    "slow": (0.0, 0.0, 0.0, 0.0, 1.0),
    "uniform": (0.2, 0.2, 0.2, 0.2, 0.2),
    "random": (0.7, 0.1, 0.1, 0.05, 0.05),
    "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
    "fast1": (0.225, 0.225, 0.225, 0.225, 0.1),
    "fast2": (0.2375, 0.2375, 0.2375, 0.2375, 0.05),
    "fast3": (0.25, 0.25, 0.25, 0.25, 0.0),
}
"""Table 1: probability of each of five tiers, fastest first."""


def policy_probs(policy: str | Sequence[float], num_tiers: int) -> Floats:
    """Return the probability of each tier that a policy begins with: (num_tiers,), sums to 1.

    Those of "adaptive" and "paced" follow once latencies are known.
    For other than five tiers, "uniform" and "fast1" to "fast3" keep the slowest tier's
    probability and share the rest equally, and "random" is resampled.

    >>> policy_probs("random", 5)
    array([0.7 , 0.1 , 0.1 , 0.05, 0.05])
    >>> policy_probs("fast1", 3)
    array([0.45, 0.45, 0.1 ])
    """
    check_count("num_tiers", num_tiers, 1)
    if not isinstance(policy, str):
        probs = np.array(policy, np.float64)
        if probs.shape != (num_tiers,):
            raise invalid("policy", policy, f"have num_tiers={num_tiers} entries")
        if not (np.isfinite(probs) & (probs >= 0)).all() or abs(probs.sum() - 1) > 1e-6:
            raise invalid("policy", policy, "hold probabilities that sum to 1")
        return np.asarray(probs / probs.sum())
    check_choice("policy", policy, (ADAPTIVE, ALGORITHM_2, PACED, VANILLA, *STATIC_POLICIES))
    if num_tiers == 1:
        return np.ones(1)
    if policy == VANILLA:
        raise invalid("num_tiers", num_tiers, "be 1 for policy 'vanilla'")
    row = STATIC_POLICIES["uniform" if policy in (ADAPTIVE, ALGORITHM_2, PACED) else policy]
    if policy == "random" or num_tiers == len(row):
        return resample(np.array(row), num_tiers)
    if policy == "fast":
        return np.asarray(np.eye(num_tiers)[0])
    slowest = 1 / num_tiers if row[-1] == row[0] else row[-1]
    return np.array([(1 - slowest) / (num_tiers - 1)] * (num_tiers - 1) + [slowest])


def resample(probs: Floats, num_tiers: int) -> Floats:
    """Keep the probability of every part of the fleet with another number of equal tiers.

    probs: (any,) -> (num_tiers,) with the same sum.

    >>> resample(np.array([0.7, 0.1, 0.1, 0.05, 0.05]), num_tiers=2)
    array([0.85, 0.15])
    """
    if num_tiers == len(probs):
        return probs
    cumulative = np.concatenate([[0.0], np.cumsum(probs)])
    position = np.linspace(0, len(probs), num_tiers + 1)
    return np.asarray(np.diff(np.interp(position, range(len(cumulative)), cumulative)))


# --- Section 4.4: Algorithm 2, adaptive tier selection -----------------------------------------


class TierState(NamedTuple):
    """What Algorithm 2 carries from round to round, each (num_tiers,).

    ``accuracy`` is NaN where unknown, ``credits`` are those left, inf without a limit,
    ``full_credits`` those added once none is left; ``latency`` (seconds) and ``due`` are for
    :mod:`~flwr_hetero.tifl.pacing`.

    >>> TierState.first(np.ones(2) / 2, np.array([2.0, 1.0]), np.array([0.1, 0.3])).accuracy
    array([nan, nan])
    """

    probs: Floats
    accuracy: Floats
    credits: Floats
    full_credits: Floats
    latency: Floats
    due: Floats

    @classmethod
    def first(cls, probs: Floats, full_credits: Floats, latency: Floats) -> "TierState":
        """Begin with these probabilities, all credits and no accuracy (l. 1)."""
        unknown, none = np.full(len(probs), np.nan), np.zeros(len(probs))
        return cls(probs, unknown, full_credits, full_credits, latency, none)


def check_credits(credits: int | Sequence[int] | None, num_tiers: int) -> list[int] | None:
    """Check credits, one number for all tiers or one per tier; return one per tier."""
    if credits is None:
        return None
    each = list(credits) if isinstance(credits, Sequence) else [credits] * num_tiers
    if len(each) != num_tiers:
        raise invalid("credits", credits, f"have num_tiers={num_tiers} entries")
    return [check_count("credits", one, 1) for one in each]


def spread_over(num_tiers: int, credits: int | Sequence[int] | None) -> Floats:
    """Return the credits of each tier, which spends one for each round that it trains (l. 1).

    credits: None (no limit), the same number for all, or one per tier, fastest first; resampled,
    rounded up, if there are fewer tiers -> (num_tiers,).

    >>> spread_over(2, [8, 4, 1])
    array([10.,  3.])
    """
    if credits is None:
        return np.full(num_tiers, np.inf)
    if isinstance(credits, int):
        return np.full(num_tiers, float(credits))
    return np.ceil(resample(np.array(credits, np.float64), num_tiers))


def draw_tier(
    state: TierState, weights: Floats, possible: Flags, rng: np.random.Generator
) -> tuple[int, Floats, TierState]:
    """Draw the tier of a round among those with nodes and credits (Alg. 2, l. 8-14).

    weights: (num_tiers,), in Algorithm 2 ``state.probs``, possible: (num_tiers,), tiers with nodes
    -> tier, probabilities (num_tiers,), state.

    The paper draws until it meets a tier with credits, which never ends once no tier has any:
    here all are refilled then. A single draw over the eligible tiers has the same distribution.

    >>> state = TierState.first(np.array([0.9, 0.1]), np.array([1.0, 0.0]), latency=np.ones(2))
    >>> possible, rng = np.array([True, True]), np.random.default_rng(0)
    >>> tier, probs, state = draw_tier(state, state.probs, possible, rng)
    >>> tier, probs, state.credits
    (0, array([1., 0.]), array([0., 0.]))
    """
    eligible = possible & (state.credits > 0)  # l. 10
    if not eligible.any():
        state = state._replace(credits=state.credits + state.full_credits)
        eligible = possible
    options = [weights * eligible, state.probs * eligible, eligible.astype(np.float64)]
    weights = next(one for one in options if one.any())  # "fast", say, with no node of tier 0
    probs = weights / weights.sum()
    tier = int(rng.choice(len(probs), p=probs))  # l. 9
    spent = state.credits - (np.arange(len(probs)) == tier)  # l. 11; l. 16 would be the second
    return tier, probs, state._replace(credits=spent)


def refund(state: TierState, tier: int) -> TierState:
    """Give its credit back to a tier of which no reply counts.

    >>> state = TierState.first(np.ones(2) / 2, np.array([3.0, 3.0]), latency=np.ones(2))
    >>> refund(state, tier=1).credits
    array([3., 4.])
    """
    return state._replace(credits=state.credits + (np.arange(len(state.credits)) == tier))


def update_probs(state: TierState, accuracy: Floats, current: int | None) -> TierState:
    """Keep the accuracies; change the probabilities if the current tier's has not improved.

    accuracy: (num_tiers,) of this evaluation, NaN where unknown; current: the tier that trained
    last (Alg. 2, l. 3-7).

    >>> state = TierState.first(np.ones(2) / 2, np.full(2, np.inf), latency=np.ones(2))
    >>> state = update_probs(state, np.array([0.9, 0.4]), current=0)
    >>> state = update_probs(state, np.array([0.9, 0.5]), current=0)
    >>> state.probs
    array([0.33333333, 0.66666667])
    """
    before = state.accuracy
    state = state._replace(accuracy=np.where(np.isnan(accuracy), before, accuracy))
    if current is not None and accuracy[current] <= before[current]:  # l. 4; False with NaN
        state = state._replace(probs=change_probs(state.accuracy))  # l. 5
    return state


def change_probs(accuracy: Floats) -> Floats:
    r"""Give tiers of lower accuracy a higher probability (Alg. 2, ChangeProbs).

    .. math:: p_j \propto (m + 1 + higher_j - lower_j) / 2

    accuracy: (num_tiers,), NaN where unknown (ties with all) -> (num_tiers,), sums to 1.

    The paper leaves the rule open. Ranks are free of scale, ties share theirs, and no tier falls
    below 2 / (m (m + 1)).

    >>> change_probs(np.array([0.9, 0.5]))
    array([0.33333333, 0.66666667])
    """
    higher = (accuracy > accuracy[:, None]).sum(axis=1)
    lower = (accuracy < accuracy[:, None]).sum(axis=1)
    weights = (len(accuracy) + 1 + higher - lower) / 2
    return np.asarray(weights / weights.sum())


# --- Section 4.6: differential privacy ---------------------------------------------------------


def sampling_rates(
    tier_probs: Floats, tier_sizes: NDArray[np.int64], clients_per_round: int
) -> Floats:
    r"""Return the probability that a node of each tier trains in a round, for a static policy.

    .. math:: q_j = \frac{\theta_j}{n_{tiers}} \frac{|C|}{|n_j|}, \quad q_{max} = \max_j q_j

    tier_probs, tier_sizes: (num_tiers,) -> (num_tiers,).

    >>> sampling_rates(np.array([0.7, 0.2, 0.1]), np.array([10, 10, 10]), clients_per_round=5)
    array([0.35, 0.1 , 0.05])
    """
    return tier_probs * np.minimum(clients_per_round / tier_sizes, 1.0)
