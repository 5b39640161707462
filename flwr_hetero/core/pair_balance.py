r"""GraB's pair balancing: signs for pairs of gradients; see ``orders`` for what they do.

A *unit* is what is ordered: an example, or a fixed small batch. Two units visited one after the
other are a pair; their difference :math:`z` gets a sign so that the signed sum stays short. The
unit with +1 goes to the front half of the next order, the one with -1 to the back half.

References
----------
.. [1] Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated
   Training", NeurIPS 2023, Algorithm 2 and appendix B.2.
.. [2] Alweiss, Liu and Sawhney, "Discrepancy minimization via a self-balancing walk", STOC 2021.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.orders import Signs, herding_bound, reorder

__all__ = ["herding_bound", "pair_balance", "reorder", "self_balancing_walk"]

Vectors = NDArray[np.floating]


def pair_balance(running_sum: ArrayLike, pair_diffs: ArrayLike) -> tuple[Vectors, Signs]:
    r"""Give each pair difference the sign that keeps the running sum short (Algorithm 2).

    .. math:: s = +1 \iff \|r + z\| \le \|r - z\| \iff \langle r, z \rangle \le 0,
              \qquad r \leftarrow r + s z

    Parameters
    ----------
    running_sum : array_like of float, shape (dim,)
        Signed sum r so far; zeros at the start of an epoch.
    pair_diffs : array_like of float, shape (num_pairs, dim)
        Differences z = first unit - second unit, in the order of the visit. For one step of all
        nodes: a row per node, in fixed order.

    Returns
    -------
    running_sum : ndarray of float, shape (dim,)
        The new sum, float32 if both inputs are, else float64. The inputs are left as they were.
    signs : ndarray of int8, shape (num_pairs,)
        +1 or -1 of the first unit of each pair; the second has the opposite.

    Raises
    ------
    ValueError
        If the shapes do not fit or a value is not finite.

    Notes
    -----
    The greedy rule of all published experiments [1]_. A tie, such as the first pair of an epoch,
    gives +1. Multiplying all vectors by a constant changes no sign.

    Examples
    --------
    >>> pair_balance([0.0, 0.0], [[1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    (array([-2.,  1.]), array([ 1, -1,  1], dtype=int8))
    """
    total, diffs = _inputs(running_sum, pair_diffs)
    signs = np.ones(len(diffs), np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, diff in enumerate(diffs):
            if total @ diff <= 0:
                total += diff
            else:
                total -= diff
                signs[row] = -1
    return _finite(total), signs


def self_balancing_walk(
    running_sum: ArrayLike, pair_diffs: ArrayLike, rng: np.random.Generator, *, c: float = 30.0
) -> tuple[Vectors, Signs]:
    r"""Draw the signs with a bias towards short sums: the rule that the theory is about [2]_.

    .. math:: P(s = +1) = \tfrac12 - \frac{\langle r, z \rangle}{2c}, \quad r \leftarrow r + s z

    Parameters
    ----------
    running_sum, pair_diffs
        As for :func:`pair_balance`; the differences should be no longer than 1.
    rng : np.random.Generator
        One uniform number per pair.
    c : float
        Scale of the walk: the larger, the closer to coin flips.

    Returns
    -------
    running_sum, signs
        As from :func:`pair_balance`.

    Raises
    ------
    ValueError
        As for :func:`pair_balance`, and if ``c`` is not positive.

    Notes
    -----
    The walk as analysed fails where a chance leaves [0, 1]; here it is clipped. The signs depend
    on the scale of the vectors, and the sums stay longer than by the greedy rule.

    Examples
    --------
    >>> self_balancing_walk([9.0], [[1.0], [-1.0]], np.random.default_rng(0), c=5.0)
    (array([7.]), array([-1,  1], dtype=int8))
    """
    if not c > 0:
        raise invalid("c", c, "be positive", "30 is usual for vectors of length 1")
    total, diffs = _inputs(running_sum, pair_diffs)
    signs = np.ones(len(diffs), np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, (diff, draw) in enumerate(zip(diffs, rng.random(len(diffs)), strict=True)):
            if draw < 0.5 - (total @ diff) / (2 * c):
                total += diff
            else:
                total -= diff
                signs[row] = -1
    return _finite(total), signs


def _inputs(running_sum: ArrayLike, pair_diffs: ArrayLike) -> tuple[Vectors, Vectors]:
    """Copy the sum, look at the differences, both in one type."""
    start, diffs = np.asarray(running_sum), np.asarray(pair_diffs)
    if start.ndim != 1 or diffs.ndim != 2 or diffs.shape[1] != len(start):
        rule = f"have shape (num_pairs, dim) beside a running_sum of shape {start.shape}"
        raise invalid("pair_diffs", diffs.shape, rule, "pass one row per pair")
    dtype = np.result_type(start, diffs, np.float32)
    return start.astype(dtype), diffs.astype(dtype, copy=False)


def _finite(total: Vectors) -> Vectors:
    """Refuse a sum that a bad value has spoilt; checking the sum is cheaper than each vector."""
    if not np.isfinite(total).all():
        raise invalid("pair_diffs", total[~np.isfinite(total)][:3], "be finite", "drop bad replies")
    return total
