r"""PGD's choice of a batch and its aggregated gradient (Algorithm 1).

The priority of example i is the inner product :math:`p_i = \bar g \cdot g_i` of its gradient
with the sum of all gradients (Eq. 8): how much a step on it alone lowers the whole loss. An
iteration computes it for a few examples, in turn and for their priority, and extrapolates the
others (:mod:`flwr_hetero.core.priority_trend`).

References
----------
.. [1] Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models
   through Prioritization", sections II and III.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid


def pick_top(
    priority: NDArray[np.float64], num_top: int, taken: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Choose the examples of highest priority that are not taken yet (Algorithm 1, line 15).

    Parameters
    ----------
    priority : ndarray of float64, shape (num_samples,)
        Estimates; NaN counts as the lowest.
    num_top : int
        How many to choose; fewer come back where fewer are left.
    taken : ndarray of int64
        Examples that are in the batch already.

    Returns
    -------
    ndarray of int64, shape (min(num_top, examples left),)
        In no particular order.

    Examples
    --------
    >>> pick_top(np.array([0.5, 3.0, 2.0, np.nan]), 2, taken=np.array([1])).tolist()
    [0, 2]
    """
    left = np.ones(len(priority), dtype=bool)
    left[taken] = False
    candidates = np.flatnonzero(left)
    if num_top >= len(candidates):
        return candidates
    known = np.nan_to_num(priority[candidates], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    chosen = np.argpartition(known, -num_top)[-num_top:] if num_top else np.empty(0, np.int64)
    return np.sort(candidates[chosen])


def renew_sum(
    total: NDArray[np.float64], new_sum: NDArray[np.float64], num_new: int, num_samples: int
) -> NDArray[np.float64]:
    r"""Replace a share of the aggregated gradient by newly computed gradients (Eq. 9).

    .. math:: \bar g \leftarrow (1 - n / N) \, \bar g + g_n

    Parameters
    ----------
    total : ndarray of float64
        Aggregated gradient: a *sum* over the N examples, not a mean.
    new_sum : ndarray of float64, same shape
        Sum of the n new gradients.
    num_new, num_samples : int
        n and N.

    Returns
    -------
    ndarray of float64
        The renewed sum.

    Examples
    --------
    >>> renew_sum(np.array([10.0]), np.array([3.0]), num_new=2, num_samples=10)
    array([11.])
    """
    return (1 - num_new / num_samples) * total + new_sum


def batch_parts(num_samples: int, top_ratio: float, renewal_ratio: float) -> tuple[int, int]:
    """Turn the paper's k and r into numbers of examples per iteration.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    top_ratio : float
        k in [0, 1): share of the data taken for its priority in each iteration.
    renewal_ratio : float
        r in (0, 1]: share of the data whose priority is renewed in each iteration, in turn.

    Returns
    -------
    num_top, num_renewed : int
        ``num_renewed`` is at least 1; together at most ``num_samples``.

    Raises
    ------
    ValueError
        If a ratio is out of range or they add up to more than 1.

    Examples
    --------
    >>> batch_parts(1000, top_ratio=0.01, renewal_ratio=0.02)
    (10, 20)
    """
    if not 0 < renewal_ratio <= 1:
        rule = "lie in (0, 1]"
        raise invalid("renewal_ratio", renewal_ratio, rule, "priorities must be renewed, try 0.01")
    if not 0 <= top_ratio < 1:
        raise invalid("top_ratio", top_ratio, "lie in [0, 1)", "the paper takes 0.01")
    if top_ratio + renewal_ratio > 1:
        rule = f"be at most 1 - renewal_ratio = {1 - renewal_ratio:g}"
        raise invalid("top_ratio", top_ratio, rule, "the two parts of a batch do not overlap")
    num_renewed = max(1, round(renewal_ratio * num_samples))
    return min(round(top_ratio * num_samples), num_samples - num_renewed), num_renewed


def top_scale(renewed: float, top: float) -> float:
    r"""Shorten the step of the top part to the progress of the renewed part.

    .. math:: c = \bar p_S / \bar p_T, \quad 0.01 \le c \le 1

    Parameters
    ----------
    renewed : float
        Mean priority of the examples taken in turn: progress of their mean gradient along
        the aggregated gradient.
    top : float
        Mean priority of the examples taken for theirs.

    Returns
    -------
    float
        Weight of the top part in [0.01, 1]: never 0, so that its gradients still come back.

    Notes
    -----
    Not in the paper. The top part points well but is ten times too long, so that the literal
    step overshoots. Scaling by the ratio of gradient *norms* was tried too and does worse: the
    norm of a small batch's mean gradient is mostly noise, which does not move along the
    aggregated gradient.

    Examples
    --------
    >>> top_scale(1.0, 8.0), top_scale(-1.0, 8.0), top_scale(2.0, 1.0)
    (0.125, 0.01, 1.0)
    """
    return min(1.0, max(renewed / top, 0.01)) if top > 0 else 1.0


def top_share(priorities: NDArray[np.float64], top_ratio: float) -> float:
    r"""Tell how much of the loss decrease the top examples account for (Figure 1b).

    Parameters
    ----------
    priorities : ndarray of float64, shape (num_samples,)
        Of all examples: the decrease of the whole loss by a small step on each alone.
    top_ratio : float
        k in (0, 1].

    Returns
    -------
    float
        Sum over the top examples, at least one, over the sum of all; more than 1 where the
        others stand in the way, NaN where all together achieve nothing.

    Examples
    --------
    >>> top_share(np.array([6.0, 1.0, -1.0, 2.0]), top_ratio=0.25)
    0.75
    """
    whole = priorities.sum()
    count = max(1, round(top_ratio * len(priorities)))
    top = np.partition(priorities, -count)[-count:]
    return float(top.sum() / whole) if whole > 0 else float("nan")
