"""Adaptive choice of tiers: ChangeProbs and credits (TiFL, section 4.4, Algorithm 2)."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.tier_policy import normalise

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
