r"""PGD's choice of a batch and its aggregated gradient (Algorithm 1).

The priority of example i is the inner product :math:`p_i = \bar g \cdot g_i` of its gradient
with the sum of all gradients (Eq. 8): how much a step on it alone lowers the whole loss. An
iteration computes it for a few examples, in turn and for their priority, and extrapolates the
others (:mod:`flwr_hetero.pgd.algorithm`).

References
----------
.. [1] Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models
   through Prioritization", sections II and III.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid


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


MAX_EXPONENT = 20.0
"""Largest exponent of an extrapolation: a stale trend must not overflow."""


class Trend(NamedTuple):
    """What is known of some examples' priorities: the paper's :math:`u_k = (p_j, a_j, j)`.

    Parameters
    ----------
    priority : ndarray of float64, shape (n,)
        Signed priority when it was last computed; NaN where it never was.
    slope : ndarray of float64, shape (n,)
        Change of ``log|priority|`` per iteration.
    computed_at : ndarray of int64, shape (n,)
        Iteration of that computation; -1 where there was none.
    """

    priority: NDArray[np.float64]
    slope: NDArray[np.float64]
    computed_at: NDArray[np.int64]

    def rows(self, indices: NDArray[np.int64]) -> "Trend":
        """Copy the entries of some examples."""
        return Trend(self.priority[indices], self.slope[indices], self.computed_at[indices])

    def put(self, indices: NDArray[np.int64], rows: "Trend") -> None:
        """Replace the entries of some examples, in place."""
        for whole, part in zip(self, rows, strict=True):
            whole[indices] = part


def start_trend(num_samples: int) -> Trend:
    """Begin with nothing known about any example.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.

    Returns
    -------
    Trend
        NaN priorities, flat slopes.

    Examples
    --------
    >>> start_trend(2).priority
    array([nan, nan])
    """
    return Trend(
        priority=np.full(num_samples, np.nan),
        slope=np.zeros(num_samples),
        computed_at=np.full(num_samples, -1, dtype=np.int64),
    )


def learn(
    last: Trend, priorities: NDArray[np.float64], iteration: int, smoothing: float = 0.8
) -> Trend:
    r"""Take in newly computed priorities and bend their trend (Algorithm 2, learn).

    .. math:: a_i = \lambda \frac{\ln p_i - \ln p_j}{i - j} + (1 - \lambda) a_j

    Parameters
    ----------
    last : Trend
        What was known of these examples, arrays of shape (batch,).
    priorities : ndarray of float64, shape (batch,)
        Their signed priorities, just computed.
    iteration : int
        The current iteration i, at least ``last.computed_at``.
    smoothing : float
        The paper's lambda in [0, 1]: weight of the newest slope.

    Returns
    -------
    Trend
        What is known of them now.

    Notes
    -----
    The paper's logarithm has no meaning for a priority that is not positive, and such are
    common (a sixth at the start of training, up to half later). The logarithm of the ratio
    exists wherever both values have the same sign; where they do not, or where there is no
    earlier value, the trend starts again, flat. A second value in the same iteration replaces
    the first and leaves the slope alone.

    Examples
    --------
    >>> last = Trend(np.array([8.0, 1.0]), np.zeros(2), np.array([0, 0]))
    >>> learn(last, np.array([2.0, -1.0]), iteration=2, smoothing=1.0).slope
    array([-0.69314718,  0.        ])
    """
    age = iteration - last.computed_at
    same_sign = last.priority * np.sign(priorities) > 0  # False for NaN
    logs = [
        np.log(np.abs(values), out=np.zeros(len(age)), where=same_sign)
        for values in (last.priority, priorities)
    ]
    newest = (logs[1] - logs[0]) / np.maximum(age, 1)
    slope = np.where(same_sign, smoothing * newest + (1 - smoothing) * last.slope, 0.0)
    slope = np.where(age > 0, slope, last.slope)
    return Trend(priorities.copy(), slope, np.full(len(age), iteration, dtype=np.int64))


def estimate(trend: Trend, iteration: int) -> NDArray[np.float64]:
    r"""Extrapolate every priority to this iteration (Algorithm 2, estimate).

    .. math:: p_i = p_j e^{a_j (i - j)}

    Parameters
    ----------
    trend : Trend
        From :func:`learn`.
    iteration : int
        The current iteration i.

    Returns
    -------
    ndarray of float64, shape (num_samples,)
        Signed estimates; NaN where nothing was ever computed.

    Examples
    --------
    >>> trend = Trend(np.array([4.0, -3.0]), np.array([-0.5, 0.0]), np.array([0, 0]))
    >>> estimate(trend, iteration=2).round(3)
    array([ 1.472, -3.   ])
    """
    exponent = trend.slope * (iteration - trend.computed_at)
    result: NDArray[np.float64] = trend.priority * np.exp(
        np.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT)
    )
    return result


def shares(
    importance: NDArray[np.float32], known: NDArray[np.bool_], mean: float, mixing: float
) -> NDArray[np.float64]:
    r"""Say how often each example should come in an epoch of N draws.

    .. math:: N q_i = (1 - \lambda) \, s_i / \bar s + \lambda

    Parameters
    ----------
    importance : ndarray of float32, shape (n,)
        Scores s, not negative.
    known : ndarray of bool, shape (n,)
        Which of them are known; the others count as average.
    mean : float
        Mean of all that are known; 0 where nothing is.
    mixing : float
        Share :math:`\lambda` of uniform draws in (0, 1].

    Returns
    -------
    ndarray of float64, shape (n,)
        With mean 1 over all examples; each 1 where the mean is 0.

    Examples
    --------
    >>> known = np.array([True, True, False])
    >>> shares(np.array([3.0, 1.0, 0.0]), known, mean=2.0, mixing=0.5)
    array([1.25, 0.75, 1.  ])
    """
    if mean == 0.0:
        return np.ones(len(importance))
    relative = np.where(known, importance.astype(np.float64) / mean, 1.0)
    return (1.0 - mixing) * relative + mixing


def weighted_shuffle(shares: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw an epoch in which each example stands its share of times, rounded up or down.

    Parameters
    ----------
    shares : ndarray of float64, shape (num_samples,)
        Wanted number of times, with mean 1.
    rng : np.random.Generator
        Source of chance.

    Returns
    -------
    ndarray of int64, shape (num_samples,)
        Examples in random order. The expected number of times is the share exactly.

    Notes
    -----
    Systematic sampling: the shares are laid end to end in random order and every whole number
    after a random start picks the example that it falls on. With equal shares this is a
    permutation, so that nothing of what reshuffling gains over independent draws is lost.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sorted(weighted_shuffle(np.array([2.0, 1.5, 0.5, 0.0]), rng).tolist())
    [0, 0, 1, 2]
    >>> sorted(weighted_shuffle(np.ones(4), rng).tolist())
    [0, 1, 2, 3]
    """
    count = len(shares)
    order = rng.permutation(count)
    edges = np.cumsum(shares[order])
    edges *= count / edges[-1]
    edges[-1] = count
    ticks = np.arange(count) + rng.random()
    return rng.permutation(order[np.searchsorted(edges, ticks, side="right").clip(max=count - 1)])
