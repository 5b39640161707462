"""Profiling and tiering: from measured latencies to groups of alike nodes (TiFL, section 4.2)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import invalid

NOT_PLACED = -1
"""The tier of a node that has no latency: a dropout, or not profiled yet."""


class Tiering(NamedTuple):
    """Which node is in which tier; tier 0 is the fastest.

    Attributes
    ----------
    tier : ndarray of int64, shape (num_nodes,)
        Tier of each node; -1 where the node has no latency.
    boundaries : ndarray of float64, shape (num_tiers - 1,)
        Latencies in seconds between neighbouring tiers, for :func:`place`.
    latency : ndarray of float64, shape (num_tiers,)
        Median latency of each tier's nodes in seconds.
    """

    tier: NDArray[np.int64]
    boundaries: NDArray[np.float64]
    latency: NDArray[np.float64]

    @property
    def num_tiers(self) -> int:
        """Number of tiers that resulted; each has at least one node."""
        return len(self.latency)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Nodes per tier, shape (num_tiers,)."""
        return np.bincount(self.tier[self.tier >= 0], minlength=self.num_tiers)


def median_latency(
    rounds: ArrayLike, t_max: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Sum up the profiling rounds: one latency per node, and who never answered in time.

    Parameters
    ----------
    rounds : array_like of float, shape (sync_rounds, num_nodes)
        Measured latency in seconds; NaN where the node did not answer.
    t_max : float
        Longest wait of a profiling round in seconds. Slower answers count as time-outs.

    Returns
    -------
    latency : ndarray of float64, shape (num_nodes,)
        Median over the rounds in seconds, a time-out counted as ``t_max``.
    dropout : ndarray of bool, shape (num_nodes,)
        True where every round timed out.

    Raises
    ------
    ValueError
        If ``t_max`` is not positive and finite, or ``rounds`` is not a matrix with at least
        one row, or holds negative figures.

    Notes
    -----
    The paper accumulates L_i, a time-out as T_max, and drops a node if
    L_i >= sync_rounds * T_max. No addend exceeds T_max, so that is the same as "timed out
    every time"; said that way it needs no sum, which could round. The latency of a node is
    the median and not the paper's accumulated time, so that one slow start does not move it.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.2.

    Examples
    --------
    >>> latency, dropout = median_latency([[1, 9, np.nan], [3, np.nan, np.nan], [2, 9, 80]], 30)
    >>> latency
    array([ 2.,  9., 30.])
    >>> dropout
    array([False, False,  True])
    """
    if not (np.isfinite(t_max) and t_max > 0):
        raise invalid("t_max", t_max, "be positive and finite", "pass the longest wait in seconds")
    measured = np.asarray(rounds, dtype=np.float64)
    if measured.ndim != 2 or not len(measured):
        raise invalid(
            "rounds", measured.shape, "be (sync_rounds, num_nodes)", "profile at least one round"
        )
    if (measured < 0).any():
        raise invalid("rounds", float(np.nanmin(measured)), "hold no negative time", "leave it NaN")
    timed_out: NDArray[np.bool_] = np.isnan(measured) | (measured >= t_max)
    latency = np.median(np.where(timed_out, t_max, measured), axis=0)
    return latency, np.all(timed_out, axis=0)


def quantile_tiers(latency: ArrayLike, num_tiers: int) -> Tiering:
    """Cut the nodes, sorted by latency, into tiers of as equal size as ties allow.

    Parameters
    ----------
    latency : array_like of float, shape (num_nodes,)
        Seconds; NaN for nodes that are not to be placed.
    num_tiers : int
        Tiers wanted. Fewer result if there are fewer different latencies.

    Returns
    -------
    Tiering
        Exactly ``min(num_tiers, number of different latencies)`` tiers.

    Raises
    ------
    ValueError
        If ``num_tiers`` is below 1, or no latency is known, or one is negative or infinite.

    Notes
    -----
    Nodes with equal latency always share a tier, so a tier depends on latency alone and
    never on the order of the nodes. Without ties sizes differ by at most 1.

    Examples
    --------
    >>> quantile_tiers([0.5, 8.0, 1.0, 7.0, np.nan], num_tiers=2)
    Tiering(tier=array([ 0,  1,  0,  1, -1]), boundaries=array([4.]), latency=array([0.75, 7.5 ]))
    >>> quantile_tiers([2.0, 2.0, 2.0], num_tiers=5).num_tiers
    1
    """
    placed = _check(latency, num_tiers)
    ordered = np.sort(placed[~np.isnan(placed)])
    changes = np.flatnonzero(np.diff(ordered)) + 1  # where a cut parts no equal latencies
    num_cuts = min(num_tiers - 1, len(changes))
    cuts: list[int] = []
    first, begin = 0, 0  # first change still free, begin of the current tier
    for remaining in range(num_cuts, 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        free = changes[first : len(changes) - remaining + 1]  # leaves one for each cut to come
        nearest = int(np.abs(free - ideal).argmin())
        first, begin = first + nearest + 1, int(free[nearest])
        cuts.append(begin)
    return _cut(placed, ordered, np.array(cuts, dtype=np.int64))


def histogram_tiers(latency: ArrayLike, num_tiers: int) -> Tiering:
    """Group latencies by a histogram with bins of equal width; empty bins are dropped.

    Parameters
    ----------
    latency : array_like of float, shape (num_nodes,)
        Seconds; NaN for nodes that are not to be placed.
    num_tiers : int
        Number m of bins between the smallest and the largest latency.

    Returns
    -------
    Tiering
        One tier per bin that holds a node: between 1 and ``num_tiers``.

    Raises
    ------
    ValueError
        As for :func:`quantile_tiers`.

    Notes
    -----
    This is the paper's rule. On the paper's own fleet (latency in proportion to 1 / CPU
    share) it gives two tiers of 40 and 10 nodes and not five of 10, see the example; that is
    why quantiles are the default. Boundaries lie midway between the tiers' nodes, not on
    bin edges, so that a joiner comes to the nearest tier where bins were dropped.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.2.

    Examples
    --------
    >>> histogram_tiers(1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10), num_tiers=5).sizes
    array([40, 10])
    """
    placed = _check(latency, num_tiers)
    ordered = np.sort(placed[~np.isnan(placed)])
    edges = np.linspace(ordered[0], ordered[-1], num_tiers + 1)
    cuts = np.unique(np.searchsorted(ordered, edges[1:-1]))
    return _cut(placed, ordered, cuts[(cuts > 0) & (cuts < len(ordered))])


def place(latency: ArrayLike, boundaries: ArrayLike) -> NDArray[np.int64]:
    """Find the tiers of nodes that were measured after the tiers were made.

    Parameters
    ----------
    latency : array_like of float, shape (num_nodes,)
        Seconds; NaN for nodes that are not to be placed.
    boundaries : array_like of float, shape (num_tiers - 1,)
        From :class:`Tiering`.

    Returns
    -------
    ndarray of int64, shape (num_nodes,)
        Tier of each node; -1 where the latency is NaN. The nodes that the tiers were made
        from come to their own tiers.

    Examples
    --------
    >>> place([0.1, 4.0, 99.0, np.nan], boundaries=[4.0])
    array([ 0,  0,  1, -1])
    """
    seconds = np.asarray(latency, dtype=np.float64)
    tier = np.searchsorted(np.asarray(boundaries, dtype=np.float64), seconds).astype(np.int64)
    return np.where(np.isnan(seconds), NOT_PLACED, tier)


def _check(latency: ArrayLike, num_tiers: int) -> NDArray[np.float64]:
    seconds = np.asarray(latency, dtype=np.float64)
    if num_tiers < 1:
        raise invalid("num_tiers", num_tiers, "be at least 1", "pass the number of groups you want")
    if seconds.ndim != 1 or np.isnan(seconds).all():
        raise invalid(
            "latency",
            seconds,
            "hold at least one figure",
            "raise t_max or check the nodes",
        )
    if (seconds < 0).any() or np.isinf(seconds).any():
        raise invalid("latency", seconds, "be finite and not negative", "pass NaN where unknown")
    return seconds


def _cut(
    latency: NDArray[np.float64], ordered: NDArray[np.float64], cuts: NDArray[np.int64]
) -> Tiering:
    """Make tiers from the sorted latencies, a new tier beginning at each position in cuts."""
    slowest, fastest = ordered[cuts - 1], ordered[cuts]
    middle = slowest + (fastest - slowest) / 2
    boundaries = np.where(middle < fastest, middle, slowest)  # two neighbouring floats
    median = np.array([np.median(part) for part in np.split(ordered, cuts)])
    return Tiering(place(latency, boundaries), boundaries, median)


VANILLA = "vanilla"
"""The baseline that knows no tiers: one tier with every node."""


STATIC_POLICIES: dict[str, tuple[float, ...]] = {
    "slow": (0.0, 0.0, 0.0, 0.0, 1.0),
    "uniform": (0.2, 0.2, 0.2, 0.2, 0.2),
    "random": (0.7, 0.1, 0.1, 0.05, 0.05),
    "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
    "fast1": (0.225, 0.225, 0.225, 0.225, 0.1),
    "fast2": (0.2375, 0.2375, 0.2375, 0.2375, 0.05),
    "fast3": (0.25, 0.25, 0.25, 0.25, 0.0),
}
"""Chance of each of the paper's five tiers, fastest first (Table 1)."""


def policy_probs(policy: str | Sequence[float], num_tiers: int) -> NDArray[np.float64]:
    """Give the chance of each tier under a static policy.

    Parameters
    ----------
    policy : str or sequence of float
        A name in ``STATIC_POLICIES``, "vanilla" (with ``num_tiers=1``), or one probability
        per tier, fastest first.
    num_tiers : int
        Number of tiers.

    Returns
    -------
    ndarray of float64, shape (num_tiers,)
        Probabilities that sum to 1, fastest tier first.

    Raises
    ------
    ValueError
        If the name is unknown, or the probabilities are of another length, negative, not
        finite, or do not sum to 1.

    Notes
    -----
    The paper gives figures for five tiers. For other numbers "slow" is the slowest tier,
    "fast" the fastest, "uniform" all alike; "fast1", "fast2" and "fast3" keep the slowest
    tier's 0.1, 0.05 and 0 and share the rest equally; "random" is resampled (see
    :func:`resample`), so that the fastest fifth of the nodes keeps 0.7. With one tier every
    policy is that tier.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, Table 1.

    Examples
    --------
    >>> policy_probs("random", 5)
    array([0.7 , 0.1 , 0.1 , 0.05, 0.05])
    >>> policy_probs("fast1", 3)
    array([0.45, 0.45, 0.1 ])
    """
    if num_tiers < 1:
        raise invalid("num_tiers", num_tiers, "be at least 1", "pass the number of groups you want")
    if not isinstance(policy, str):
        return _custom_probs(policy, num_tiers)
    if policy == VANILLA and num_tiers > 1:
        raise invalid("num_tiers", num_tiers, "be 1 for policy 'vanilla'", "it knows no tiers")
    if policy not in (VANILLA, *STATIC_POLICIES):
        known = ", ".join((VANILLA, *STATIC_POLICIES))
        raise invalid("policy", policy, f"be one of {known}, or probabilities", "check the name")
    if num_tiers == 1:
        return np.ones(1)
    table = STATIC_POLICIES[policy]
    if num_tiers == len(table) or policy == "random":
        return resample(table, num_tiers)
    if policy == "fast":
        return np.asarray(np.eye(num_tiers)[0])
    slowest = 1 / num_tiers if policy == "uniform" else table[-1]
    return np.array([(1 - slowest) / (num_tiers - 1)] * (num_tiers - 1) + [slowest])


def resample(per_tier: ArrayLike, num_tiers: int) -> NDArray[np.float64]:
    """Carry a share per tier over to another number of tiers of the same fleet.

    Parameters
    ----------
    per_tier : array_like of float, shape (any,)
        Probability (or finite credits) of each tier, fastest first.
    num_tiers : int
        Number of tiers wanted.

    Returns
    -------
    ndarray of float64, shape (num_tiers,)
        The same total, spread so that every part of the fleet, sorted by speed and cut into
        tiers of equal size, keeps its share.

    Examples
    --------
    >>> resample([0.7, 0.1, 0.1, 0.05, 0.05], num_tiers=2)
    array([0.85, 0.15])
    """
    share = np.asarray(per_tier, dtype=np.float64)
    if num_tiers == len(share):
        return share.copy()
    upto = np.concatenate([[0.0], np.cumsum(share)])
    position = np.linspace(0, len(share), num_tiers + 1)
    return np.asarray(np.diff(np.interp(position, range(len(upto)), upto)))


def draw_tier(probs: ArrayLike, eligible: ArrayLike, rng: np.random.Generator) -> int:
    """Choose the tier of a round by one draw over those that may be chosen.

    Parameters
    ----------
    probs : array_like of float, shape (num_tiers,)
        Chance of each tier.
    eligible : array_like of bool, shape (num_tiers,)
        Tiers with credits and with enough nodes online.
    rng : np.random.Generator
        Source of chance; advanced by one number.

    Returns
    -------
    int
        The tier.

    Raises
    ------
    ValueError
        If no tier is eligible.

    Notes
    -----
    The paper draws again and again until a tier has credits, which never ends if none has.
    Drawing once from the chances of the eligible tiers is the same distribution. If these
    are all 0 the draw is uniform.

    Examples
    --------
    >>> draw_tier([0.9, 0.1, 0.0], [False, True, True], np.random.default_rng(0))
    1
    """
    may = np.asarray(eligible, dtype=np.bool_)
    if not may.any():
        raise invalid("eligible", may, "hold at least one true", "refill the credits, or wait")
    allowed = np.flatnonzero(may)
    chances = normalise(np.asarray(probs, dtype=np.float64)[allowed])
    return int(rng.choice(allowed, p=chances))


def normalise(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide weights by their sum; if all are 0, make them uniform.

    Parameters
    ----------
    weights : ndarray of float64, shape (any,)
        Not negative.

    Returns
    -------
    ndarray of float64, shape (any,)
        Probabilities that sum to 1.

    Examples
    --------
    >>> normalise(np.array([1.0, 3.0])), normalise(np.zeros(2))
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    if not weights.any():
        return np.full(len(weights), 1 / len(weights))
    return np.asarray(weights / weights.sum())


def _custom_probs(policy: Sequence[float], num_tiers: int) -> NDArray[np.float64]:
    probs = np.array(policy, dtype=np.float64)
    if probs.shape != (num_tiers,):
        raise invalid("policy", policy, f"have num_tiers={num_tiers} entries", "pass one per tier")
    if not np.isfinite(probs).all() or (probs < 0).any():
        cure = "pass chances of at least 0 that sum to 1"
        raise invalid("policy", policy, "hold finite figures that are not negative", cure)
    if abs(probs.sum() - 1) > 1e-6:
        raise invalid("policy", policy, f"sum to 1, not {probs.sum():g}", "divide by the sum")
    return normalise(probs)


Rule: TypeAlias = str | Callable[[NDArray[np.float64]], ArrayLike]
"""How accuracy becomes weight: "rank", "deficit" or a function of the eligible tiers'
accuracies (NaN where unknown) that returns a weight for each."""


def change_probs(
    accuracy: ArrayLike, eligible: ArrayLike, rule: Rule = "rank", exponent: float = 1.0
) -> NDArray[np.float64]:
    r"""Give tiers with lower accuracy a higher chance (Algorithm 2, ChangeProbs).

    .. math:: w_j = (m + 1 + higher_j - lower_j) / 2, \quad
              p_j = w_j^e / \sum_k w_k^e

    Parameters
    ----------
    accuracy : array_like of float, shape (num_tiers,)
        Accuracy per tier, NaN where unknown. Under "rank" any figure of which more is better.
    eligible : array_like of bool, shape (num_tiers,)
        Tiers that may be chosen, m of them; the others get 0.
    rule : {"rank", "deficit"} or callable
        "rank" is the equation, where higher_j and lower_j count the eligible tiers with
        strictly higher and lower accuracy; "deficit" is w_j = 1 - accuracy_j.
    exponent : float
        The e of the equation: 0 is uniform, above 1 presses harder.

    Returns
    -------
    ndarray of float64, shape (num_tiers,)
        Probabilities that sum to 1.

    Raises
    ------
    ValueError
        If no tier is eligible, the shapes differ, the rule is unknown or its weights are
        negative or not finite (for "deficit": an accuracy outside [0, 1]), or the exponent is
        negative.

    Notes
    -----
    The paper says only that lower accuracy shall mean a higher chance. Rank is free of
    scale, equal accuracies get equal chances, and no tier falls below 2 / (m (m + 1)). An
    unknown accuracy ties with every other: the tier gets the middle weight and is neither
    favoured nor starved. Weights that are all zero mean uniform.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.4.

    Examples
    --------
    >>> change_probs([0.9, 0.5, 0.9], eligible=[True, True, False])
    array([0.33333333, 0.66666667, 0.        ])
    """
    scores, may = np.asarray(accuracy, dtype=np.float64), np.asarray(eligible, dtype=np.bool_)
    if scores.ndim != 1 or scores.shape != may.shape or not may.any():
        raise invalid(
            "eligible", may, "hold one flag per tier, at least one true", "refill credits"
        )
    if not (np.isfinite(exponent) and exponent >= 0):
        raise invalid("exponent", exponent, "be finite and not negative", "1 is the plain rule")
    weights = np.asarray(_find_rule(rule)(scores[may]), dtype=np.float64)
    if weights.shape != (may.sum(),) or not (np.isfinite(weights) & (weights >= 0)).all():
        raise invalid(
            "rule", rule, f"give one finite weight >= 0 per tier, not {weights}", "use 'rank'"
        )
    probs = np.zeros(len(scores))
    probs[may] = normalise(weights**exponent)
    return probs


def should_change(current: float, previous: float) -> bool:
    """Tell whether the tier's accuracy failed to improve (Algorithm 2, the trigger).

    Parameters
    ----------
    current, previous : float
        Accuracy of the tier chosen last, now and one interval earlier; NaN where unknown.

    Returns
    -------
    bool
        True if ``current <= previous``; False if either is unknown.

    Examples
    --------
    >>> should_change(0.5, 0.5), should_change(0.6, 0.5)
    (True, False)
    """
    return bool(current <= previous)


PACE = 0.75
"""Power of the speed ratio in "paced" credits: 1 would give every tier the same share of the
run's time, 0 the same share of its rounds."""


SHORTEST_S = 1e-9
"""Latency in seconds that "paced" credits take for a tier whose clock shows none."""


def start_credits(
    credits: int | Sequence[int] | str | None,
    num_tiers: int,
    num_rounds: int,
    latency: ArrayLike | None = None,
) -> NDArray[np.float64]:
    r"""Set up the credits of each tier: one is spent per round that the tier is chosen.

    .. math:: paced_j = \min(2^{T-1-j}, (\max_k L_k / L_j)^{0.75}), \quad at least 1, rounded

    Parameters
    ----------
    credits : None, int, sequence of int, "equal", "geometric" or "paced"
        None: no limit. An int: the same for every tier. A sequence: one per tier, fastest
        first. "equal": the rounds shared equally, ceil(R / T). "geometric": each tier half
        as many as the next faster one, rounded up. "paced": the equation, as many as a
        tier's speed earns, and at most twice as many as the next slower one could get.
    num_tiers : int
        Number of tiers T.
    num_rounds : int
        Rounds R of the run, or of the period until credits are refilled.
    latency : array_like of float, shape (num_tiers,), optional
        Typical latency L_j of each tier in seconds, for "paced"; None: each tier twice as
        slow as the one before, or slower.

    Returns
    -------
    ndarray of float64, shape (num_tiers,)
        Credits, whole numbers; infinite where there is no limit.

    Raises
    ------
    ValueError
        If the form is not one of the above, or of another length, or a figure is negative or
        not whole, or all are 0.

    Notes
    -----
    The paper leaves the figures open. "equal" and "geometric" sum to at least R and last for
    the whole run; slow tiers may then spend theirs early and be missing at the end. "paced"
    is meant to be refilled each time it is spent, so that the mix of tiers holds in every part
    of the run; on the paper's fleet (CPU shares 4, 2, 1, 0.5, 0.1) it is 16, 8, 4, 2, 1, on a
    fleet of equal devices 1 each, where to prefer a tier would gain nothing.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.4.

    Examples
    --------
    >>> start_credits("equal", num_tiers=5, num_rounds=100)
    array([20., 20., 20., 20., 20.])
    >>> start_credits("geometric", num_tiers=5, num_rounds=100)
    array([52., 26., 13.,  7.,  4.])
    >>> start_credits("paced", num_tiers=5, num_rounds=100)
    array([16.,  8.,  4.,  2.,  1.])
    >>> start_credits("paced", num_tiers=3, num_rounds=100, latency=[1.0, 1.1, 3.0])
    array([2., 2., 1.])
    """
    if num_tiers < 1:
        raise invalid("num_tiers", num_tiers, "be at least 1", "pass the number of groups you want")
    if num_rounds < 1:
        raise invalid("num_rounds", num_rounds, "be at least 1", "pass the rounds of the run")
    if credits is None:
        return np.full(num_tiers, np.inf)
    if isinstance(credits, str):
        return _named(credits, num_tiers, num_rounds, latency)
    figures = np.atleast_1d(np.array(credits, dtype=np.float64))
    if np.ndim(credits) == 0:
        figures = np.repeat(figures, num_tiers)
    if figures.shape != (num_tiers,):
        raise invalid("credits", credits, f"have num_tiers={num_tiers} entries", "one per tier")
    whole = np.isfinite(figures) & (figures == np.floor(figures))
    if not whole.all() or (figures < 0).any() or not figures.any():
        raise invalid(
            "credits", credits, "be whole numbers >= 0, not all 0", "None means without limit"
        )
    return figures


def _named(
    credits: str, num_tiers: int, num_rounds: int, latency: ArrayLike | None
) -> NDArray[np.float64]:
    if credits == "equal":
        return np.full(num_tiers, np.ceil(num_rounds / num_tiers))
    if credits == "geometric":
        halves = 0.5 ** np.arange(num_tiers)
        return np.asarray(np.ceil(num_rounds * halves / halves.sum()))
    if credits == "paced":
        return _paced(np.asarray(2.0 ** np.arange(num_tiers)[::-1], np.float64), latency)
    raise invalid("credits", credits, "be equal, geometric or paced if a text", "check the name")


def _paced(most: NDArray[np.float64], latency: ArrayLike | None) -> NDArray[np.float64]:
    if latency is None:
        return most
    seconds = np.asarray(latency, dtype=np.float64)
    if seconds.shape != most.shape or not (np.isfinite(seconds) & (seconds >= 0)).all():
        raise invalid("latency", latency, "be finite and at least 0, one per tier", "pass seconds")
    seconds = np.maximum(seconds, SHORTEST_S)
    return np.asarray(np.minimum(most, np.round((seconds.max() / seconds) ** PACE)))


def _find_rule(rule: Rule) -> Callable[[NDArray[np.float64]], ArrayLike]:
    if callable(rule):
        return rule
    if rule not in ("rank", "deficit"):
        raise invalid("rule", rule, "be 'rank', 'deficit' or a function", "check the name")
    return _rank if rule == "rank" else _deficit


def _rank(accuracy: NDArray[np.float64]) -> NDArray[np.float64]:
    higher = (accuracy > accuracy[:, None]).sum(axis=1)  # NaN is neither higher nor lower
    lower = (accuracy < accuracy[:, None]).sum(axis=1)
    return np.asarray((len(accuracy) + 1 + higher - lower) / 2)


def _deficit(accuracy: NDArray[np.float64]) -> NDArray[np.float64]:
    known = ~np.isnan(accuracy)
    middle = accuracy[known].mean() if known.any() else 0.0
    return 1 - np.where(known, accuracy, middle)


class SamplingRates(NamedTuple):
    """How likely a node is to train in a given round.

    Attributes
    ----------
    per_tier : ndarray of float64, shape (num_tiers,)
        Chance q_j of a node of tier j.
    q_max : float
        The largest q_j: the paper's figure for the whole system.
    q_known_tier : float
        The largest chance of a node once it is known which tier was drawn.
    q_vanilla : float
        The chance without tiers, |C| / |K|.

    Examples
    --------
    >>> isinstance(sampling_rates([0.5, 0.5], [10, 40], 5), SamplingRates)
    True
    """

    per_tier: NDArray[np.float64]
    q_max: float
    q_known_tier: float
    q_vanilla: float


def sampling_rates(
    tier_probs: ArrayLike, tier_sizes: ArrayLike, clients_per_round: int
) -> SamplingRates:
    r"""Compute the sampling rates of a static policy.

    .. math:: q_j = \frac{\theta_j}{n_{tiers}} \frac{|C|}{|n_j|}, \quad q_{max} = \max_j q_j

    Parameters
    ----------
    tier_probs : array_like of float, shape (num_tiers,)
        Chance of each tier, the paper's theta_j / n_tiers.
    tier_sizes : array_like of int, shape (num_tiers,)
        Nodes per tier, |n_j|.
    clients_per_round : int
        Nodes per round, |C|; a tier with fewer sends all of them.

    Returns
    -------
    SamplingRates
        Per tier, the two maxima, and vanilla's rate to compare with.

    Raises
    ------
    ValueError
        If the shapes differ, a tier is empty or nothing is drawn.

    Notes
    -----
    With local training that is (epsilon, delta)-private, the paper claims
    (O(q_max epsilon), q_max delta) per round. That needs the tier draw to stay hidden, from
    the model's update too. If the tier is known the nodes of the other tiers hide nothing
    and only the draw within the tier amplifies: then q is |C| / |n_j|, of the smallest tier
    in use. The argument is for fixed probabilities only; see :func:`privacy_report`.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.6.

    Examples
    --------
    >>> rates = sampling_rates([0.7, 0.1, 0.1, 0.05, 0.05], [10] * 5, clients_per_round=5)
    >>> rates.q_max, rates.q_known_tier, rates.q_vanilla
    (0.35, 0.5, 0.1)
    """
    probs, sizes = np.asarray(tier_probs, np.float64), np.asarray(tier_sizes)
    if probs.ndim != 1 or probs.shape != sizes.shape or (sizes < 1).any():
        raise invalid("tier_sizes", sizes, "be one positive size per tier", "drop empty tiers")
    if clients_per_round < 1:
        raise invalid("clients_per_round", clients_per_round, "be at least 1", "pass |C|")
    within = np.minimum(clients_per_round / sizes, 1.0)
    per_tier = probs * within
    return SamplingRates(
        per_tier=per_tier,
        q_max=float(per_tier.max()),
        q_known_tier=float(within[probs > 0].max()),
        q_vanilla=float(min(clients_per_round / sizes.sum(), 1.0)),
    )


def privacy_report(rates: SamplingRates) -> str:
    """Say in words what the sampling rates of a static policy are worth.

    Parameters
    ----------
    rates : SamplingRates
        From :func:`sampling_rates`.

    Returns
    -------
    str
        A few lines: the rates and the two caveats.

    Examples
    --------
    >>> print(privacy_report(sampling_rates([1.0], [50], clients_per_round=5)))
    Privacy amplification by sampling (TiFL, section 4.6), static policy
      q_max = 0.1 (vanilla selection: 0.1)
      per round (epsilon, delta) becomes (O(0.1 epsilon), 0.1 delta)
    Caveats
      1. The draw of the tier must stay secret. Who knows the tier, or can tell it from the
         update, faces q = 0.1 and not q_max.
      2. This covers static policies only. The adaptive policy reads per-tier accuracies
         without noise, so nothing is claimed for it.
    """
    q, known = f"{rates.q_max:.4g}", f"{rates.q_known_tier:.4g}"
    return (
        "Privacy amplification by sampling (TiFL, section 4.6), static policy\n"
        f"  q_max = {q} (vanilla selection: {rates.q_vanilla:.4g})\n"
        f"  per round (epsilon, delta) becomes (O({q} epsilon), {q} delta)\n"
        "Caveats\n"
        "  1. The draw of the tier must stay secret. Who knows the tier, or can tell it from the\n"
        f"     update, faces q = {known} and not q_max.\n"
        "  2. This covers static policies only. The adaptive policy reads per-tier accuracies\n"
        "     without noise, so nothing is claimed for it."
    )
