"""Profiling and tiering: from measured latencies to groups of alike nodes (TiFL, section 4.2)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

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
