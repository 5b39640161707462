"""Importance sampling: probabilities and the weights that keep it unbiased (Mercury)."""

from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

LARGEST = float(np.finfo(np.float32).max) / 2
"""Importance is kept in single precision."""


def check_importance(importance: NDArray[np.float64]) -> None:
    """Refuse importance that cannot serve as a weight.

    Raises
    ------
    ValueError
        If a value is negative, not finite, or too large for single precision.

    Examples
    --------
    >>> check_importance(np.array([0.5, 0.0]))
    """
    if importance.size and not (importance.min() >= 0.0 and importance.max() < LARGEST):
        good = (importance >= 0.0) & (importance < LARGEST)
        raise invalid(
            "importance",
            importance[~good][:3].tolist(),
            "be finite and not negative",
            "score with a loss or a norm; if the model has diverged, lower the learning rate",
        )


class Moments(NamedTuple):
    """Running second moments of the gradient norm, per drawn sample.

    Attributes
    ----------
    uniform : float
        Under uniform draws, :math:`E_p[s^2]`.
    importance : float
        Under importance draws with their weights, :math:`E_q[(s / (N q))^2]`.
    """

    uniform: float = 0.0
    importance: float = 0.0


def observe(
    moments: Moments,
    scores: NDArray[np.float64],
    weights: NDArray[np.float64],
    importance_weights: NDArray[np.float64],
    memory: float,
) -> Moments:
    """Update both moments from one set of scored samples, however these were drawn.

    Parameters
    ----------
    moments : Moments
        Sums so far.
    scores : ndarray of float64, shape (b,)
        New gradient norms s (or their stand-in) of the samples.
    weights : ndarray of float64, shape (b,)
        Weights with which they were drawn: 1 under uniform draws.
    importance_weights : ndarray of float64, shape (b,)
        Weights :math:`1 / (N q)` that the importance in use before these scores gives them.
    memory : float
        Samples after which an observation has faded to 1/e.

    Returns
    -------
    Moments
        Faded sums plus the new ones.

    Examples
    --------
    >>> ones = np.ones(2)
    >>> observe(Moments(), np.array([1.0, 3.0]), ones, np.array([2.0, 0.5]), memory=100.0)
    Moments(uniform=10.0, importance=6.5)
    """
    fade, squares = exp(-scores.size / memory), weights * scores**2
    return Moments(
        fade * moments.uniform + float(squares.sum()),
        fade * moments.importance + float(squares @ importance_weights),
    )


def variance_ratio(moments: Moments) -> float:
    """Tell how many uniform samples one importance draw is worth.

    Parameters
    ----------
    moments : Moments
        From :func:`observe`.

    Returns
    -------
    float
        Second moment of a uniform draw over that of an importance draw; 1 where unknown.

    Notes
    -----
    With fresh importance this is the square of Katharopoulos and Fleuret's tau [1]_. Measured
    before the cache takes up the new scores, as here, it also shows what a stale cache costs.

    References
    ----------
    .. [1] Katharopoulos and Fleuret, "Not All Samples Are Created Equal: Deep Learning with
       Importance Sampling", ICML 2018.

    Examples
    --------
    >>> variance_ratio(Moments(10.0, 6.5))
    1.5384615384615385
    """
    return moments.uniform / moments.importance if moments.importance > 0.0 else 1.0
