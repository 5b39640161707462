"""Which tier trains next: static policies and the draw (TiFL, section 4.3)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

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
