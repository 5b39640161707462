r"""How PGD knows a priority between two computations: its trend (Algorithm 2).

References
----------
.. [1] Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models
   through Prioritization", section IV.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
