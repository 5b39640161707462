"""Unbalanced local SGD: how many steps each node takes between two aggregations."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import check_count, invalid
from flwr_hetero.core.step_time import check_times

ROUNDING_SLACK = 1e-9
"""So that 0.29 * 100 is 29 steps and not 28."""


def gamma_steps(
    gamma: ArrayLike, fast_steps: int, *, min_steps: int = 1, max_steps: int | None = None
) -> NDArray[np.int64]:
    r"""Give each node steps in proportion to its speed (Algorithm 1, line 1).

    .. math:: \tau_i = \max(\tau_{min}, \lfloor \gamma_i \tau_F \rfloor)

    Parameters
    ----------
    gamma : array_like of float, shape (num_nodes,)
        Performance gap ratio in (0, 1]: step time of a fast node over that of node i. NaN
        where unknown; such a node gets ``min_steps``, which is enough to measure it.
    fast_steps : int
        Steps of a fast node per round, tau_F.
    min_steps, max_steps : int
        Bounds; None is ``fast_steps``.

    Returns
    -------
    ndarray of int64, shape (num_nodes,)
        Steps per node, at least 1.

    Raises
    ------
    ValueError
        If a gamma is outside (0, 1] or a bound is not a positive integer.

    Notes
    -----
    The paper does not say how to round. We round down, so that a slow node never keeps the
    fast ones waiting unless its one step does.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.1.

    Examples
    --------
    >>> gamma_steps([1.0, 0.5, 1 / 22], fast_steps=32)
    array([32, 16,  1])
    """
    ratio = np.asarray(gamma, dtype=np.float64)
    if np.any((ratio <= 0) | (ratio > 1)):
        raise invalid("gamma", ratio.tolist(), "lie in (0, 1]", "it is fast time over slow time")
    low, high = check_bounds(fast_steps, min_steps, max_steps)
    return _whole_steps(ratio * fast_steps, low, high)


def deadline_steps(
    deadline_s: float,
    step_times_s: ArrayLike,
    transfer_times_s: ArrayLike = 0.0,
    *,
    min_steps: int = 1,
    max_steps: int | None = None,
) -> NDArray[np.int64]:
    r"""Give each node the steps that fit between its download and its upload.

    .. math:: \tau_i = \lfloor (D - c_i) / t_i \rfloor

    Parameters
    ----------
    deadline_s : float
        Length D of a round, in seconds.
    step_times_s : array_like of float, shape (num_nodes,)
        Seconds t_i per step; NaN where unknown, such a node gets ``min_steps``.
    transfer_times_s : array_like of float, shape (num_nodes,) or ()
        Seconds c_i on the link, both ways; NaN counts as 0.
    min_steps, max_steps : int
        Bounds; ``max_steps`` None is no upper bound.

    Returns
    -------
    ndarray of int64, shape (num_nodes,)
        Steps per node.

    Raises
    ------
    ValueError
        If the deadline or a step time is not positive, or a bound is not a positive integer.

    Notes
    -----
    Our generalisation: the paper has two classes and counts no link.

    Examples
    --------
    >>> deadline_steps(10.0, [0.5, 2.0, 20.0], [2.0, 0.0, 0.0])
    array([16,  5,  1])
    """
    if not (np.isfinite(deadline_s) and deadline_s > 0):
        raise invalid("deadline_s", deadline_s, "be positive and finite", "give it in seconds")
    step_s = check_times("step_times_s", step_times_s)
    low, high = check_bounds(max_steps or np.iinfo(np.int64).max, min_steps, max_steps)
    left_s = deadline_s - np.nan_to_num(np.asarray(transfer_times_s, dtype=np.float64))
    return _whole_steps(left_s / step_s, low, high)


def check_bounds(fast_steps: int, min_steps: int, max_steps: int | None) -> tuple[int, int]:
    """Check step counts; see :func:`gamma_steps` for their meaning.

    Returns
    -------
    tuple of int
        Lower and upper bound.

    Raises
    ------
    ValueError
        If a count is not a positive integer or the upper bound is below the lower.

    Examples
    --------
    >>> check_bounds(32, 1, None)
    (1, 32)
    """
    high = fast_steps if max_steps is None else max_steps
    for name, value in (("fast_steps", fast_steps), ("min_steps", min_steps), ("max_steps", high)):
        check_count(name, value, 1, "every node takes at least 1 step")
    if high < min_steps:
        raise invalid("max_steps", high, f"be at least min_steps={min_steps}", "raise it")
    return int(min_steps), int(high)


def _whole_steps(steps: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    whole = np.floor(np.nan_to_num(steps * (1 + ROUNDING_SLACK), nan=low))
    return np.clip(whole, low, min(high, 2**53)).astype(np.int64)
