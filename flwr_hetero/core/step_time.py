"""How fast each node is: step times, two classes, the performance gap ratio gamma."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

SAME_CLASS_RATIO = 1.5
"""Neighbouring step times up to this ratio are one class; below it all nodes are fast."""


def fast_class(step_times_s: ArrayLike) -> NDArray[np.bool_]:
    """Split nodes into fast and slow at the widest gap between sorted step times.

    Parameters
    ----------
    step_times_s : array_like of float, shape (num_nodes,)
        Seconds per step; NaN where unknown, such a node counts as slow.

    Returns
    -------
    ndarray of bool, shape (num_nodes,)
        True for the fast class. All measured nodes are fast where no neighbours differ by
        more than ``SAME_CLASS_RATIO``.

    Raises
    ------
    ValueError
        If a step time is not positive.

    Examples
    --------
    >>> fast_class([0.1, 3.0, 0.12, 2.5])
    array([ True, False,  True, False])
    """
    step_s = check_times("step_times_s", step_times_s)
    known = np.sort(step_s[~np.isnan(step_s)])
    if known.size < 2:
        return ~np.isnan(step_s)
    with np.errstate(over="ignore"):  # a node may claim any time on a grid without a clock
        ratios = known[1:] / known[:-1]
    widest = int(np.argmax(ratios))
    slowest_fast = known[widest] if ratios[widest] > SAME_CLASS_RATIO else known[-1]
    return np.asarray(step_s <= slowest_fast)


def class_gamma(step_times_s: ArrayLike, fast: Sequence[bool] | NDArray[np.bool_]) -> float:
    """Measure the performance gap ratio of two classes, each by its slowest node.

    Parameters
    ----------
    step_times_s : array_like of float, shape (num_nodes,)
        Seconds per step; NaN where unknown.
    fast : sequence of bool, shape (num_nodes,)
        Class of each node, from :func:`fast_class`.

    Returns
    -------
    float
        Gamma in (0, 1]; 1 where a class is empty.

    Notes
    -----
    The slowest node of each class decides, because it is the one that others wait for.

    Examples
    --------
    >>> class_gamma([1.0, 2.0, 4.0, 8.0], [True, True, False, False])
    0.25
    """
    step_s, is_fast = check_times("step_times_s", step_times_s), np.asarray(fast, dtype=bool)
    measured = ~np.isnan(step_s)
    if not (measured & is_fast).any() or not (measured & ~is_fast).any():
        return 1.0
    return float(min(1.0, step_s[measured & is_fast].max() / step_s[measured & ~is_fast].max()))


def smooth_step_time(previous_s: float, observed_s: float, smoothing: float) -> float:
    """Blend a new measurement into a node's step time.

    Parameters
    ----------
    previous_s : float
        Smoothed seconds per step so far; NaN before the first measurement.
    observed_s : float
        Seconds per step of this round.
    smoothing : float
        Weight of the past in [0, 1); 0 keeps only the newest.

    Returns
    -------
    float
        Smoothed seconds per step.

    Examples
    --------
    >>> smooth_step_time(float("nan"), 2.0, 0.5), smooth_step_time(2.0, 4.0, 0.5)
    (2.0, 3.0)
    """
    if np.isnan(previous_s):
        return observed_s
    return smoothing * previous_s + (1 - smoothing) * observed_s


def check_times(name: str, times_s: ArrayLike) -> NDArray[np.float64]:
    """Refuse times that are not positive and finite, or NaN for unknown.

    Examples
    --------
    >>> check_times("step_times_s", [1.0, 0.0])
    Traceback (most recent call last):
    ...
    ValueError: step_times_s must be positive and finite, got [1.0, 0.0]: ...
    """
    times = np.asarray(times_s, dtype=np.float64)
    if np.any(times <= 0) or np.isinf(times).any():
        raise invalid(name, times.tolist(), "be positive and finite", "use NaN where unknown")
    return times
