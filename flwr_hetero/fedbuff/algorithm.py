"""FedBuff, Nguyen et al.: Algorithm 1 on NumPy arrays, and weights that do not depend on speed."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


# --- Algorithm 1 -------------------------------------------------------------------------------


def staleness_weights(staleness: ArrayLike, exponent: float = 0.5) -> Floats:
    r"""Weigh updates down by the merges since they started (Alg. 1, l. 4).

    .. math:: a(s) = (1 + s)^{-\alpha}

    The paper's exponent is 1/2; 0 treats all alike.

    staleness: (num_updates,), at least 0 -> (num_updates,), in (0, 1].

    >>> staleness_weights([0, 3, 8])
    array([1.        , 0.5       , 0.33333333])
    """
    return np.asarray((1.0 + np.asarray(staleness, np.float64)) ** -exponent)


def default_buffer(num_at_work: int) -> int:
    """Return the number of updates K of a merge: half of the nodes at work, at least 3.

    Fewer than a quarter made merges noisy in our runs; the paper has 10 of 1,000 and more.

    >>> [default_buffer(n) for n in (1, 3, 6, 20)]
    [1, 3, 3, 10]
    """
    return min(max(3, -(-num_at_work // 2)), max(1, num_at_work))


# --- weights by examples, whatever the speed: not in the paper ---------------------------------


class Weights(NamedTuple):
    """Weights of a buffer's updates, the step of its merge, and what clipping left out."""

    weights: Floats
    step: float
    clipped_share: float
    mean: float
    """Long-run mean of the weights; continue with it."""


def interval_weights(
    weights: ArrayLike, intervals_s: ArrayLike, mean: float, rate: float, limit: float
) -> Weights:
    r"""Let every node count by its own weight, however often it answers.

    .. math:: v_i = \min(p_i \, \Delta_i, \; c \bar v)

    .. math:: w \leftarrow w + \frac{1}{K} \sum_i \frac{v_i}{\bar v} d_i

    A node with weight :math:`p_i` that answers every :math:`\Delta_i` seconds adds
    :math:`p_i d_i` per second. :math:`\bar v` is a running mean and not that of the buffer, for
    a slow node's update would else count less in the buffer that it is in.

    weights, intervals_s: (num_updates,); mean: 0 at first; rate in (0, 1] of the new figures in
    it; limit: c, at least 1.

    >>> found = interval_weights([1.0, 1.0], [1.0, 3.0], mean=0.0, rate=1.0, limit=4.0)
    >>> found.weights, found.step
    (array([1., 3.]), 1.0)
    """
    raw = np.asarray(weights, np.float64) * np.asarray(intervals_s, np.float64)
    usual = mean + rate * (float(raw.mean()) - mean) if mean else float(raw.mean())
    clipped = np.minimum(raw, limit * usual)
    mean = mean + rate * (float(clipped.mean()) - mean) if mean else float(clipped.mean())
    if not mean:
        return Weights(np.ones(len(raw)), 1.0, 0.0, 0.0)
    left_out = 1.0 - float(clipped.sum() / raw.sum()) if raw.sum() else 0.0
    return Weights(clipped, float(clipped.mean()) / mean, left_out, mean)
