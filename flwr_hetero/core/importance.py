"""Importance sampling: probabilities and the weights that keep it unbiased (Mercury)."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid

LARGEST = float(np.finfo(np.float32).max) / 2
"""Importance is kept in single precision."""


def mixed_probs(importance: NDArray[np.float64], mixing: float) -> NDArray[np.float64]:
    r"""Draw by importance, with a share drawn uniformly (Mercury's Eq. 7, made safe).

    .. math:: q_j = (1 - \lambda) I_j / \sum_k I_k + \lambda / n

    Parameters
    ----------
    importance : ndarray of float64, shape (n,)
        Finite and not negative.
    mixing : float
        Share :math:`\lambda` of uniform draws in [0, 1]; 0 is the paper's Eq. 7.

    Returns
    -------
    ndarray of float64, shape (n,)
        Probabilities that sum to 1; uniform if all importance is 0.

    Raises
    ------
    ValueError
        If an importance is negative or not finite, or ``mixing`` lies outside [0, 1].

    Notes
    -----
    The paper draws by importance alone. A sample whose (cached) importance is 0 is then
    never drawn and the gradient is biased; with :math:`\lambda > 0` every weight is at most
    :math:`1 / \lambda`, however old the cache.

    References
    ----------
    .. [1] Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic
       Importance Sampling", SenSys 2021, section 4.1.

    Examples
    --------
    >>> mixed_probs(np.array([3.0, 1.0, 0.0, 0.0]), 0.5)
    array([0.5  , 0.25 , 0.125, 0.125])
    """
    check_importance(importance)
    if not 0.0 <= mixing <= 1.0:
        raise invalid("mixing", mixing, "lie in [0, 1]", "0.5 is a safe start")
    uniform = np.full(importance.shape, 1.0 / importance.size)
    total = importance.sum()
    return uniform if total == 0.0 else (1.0 - mixing) * importance / total + mixing * uniform


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


def error_chance(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    r"""Turn cross-entropy losses into the chance of a wrong answer.

    .. math:: 1 - p_y = 1 - e^{-\ell}

    Parameters
    ----------
    losses : ndarray of float64, shape (b,)
        Cross-entropy per sample, at least 0.

    Returns
    -------
    ndarray of float64, shape (b,)
        In [0, 1). The norm of the loss's gradient at the logits, which bounds the sample's
        gradient norm, lies between this and :math:`\sqrt 2` times this: the loss alone
        gives what would otherwise need the logits.

    Examples
    --------
    >>> error_chance(np.array([0.0, np.log(2.0)]))
    array([0. , 0.5])
    """
    return np.asarray(-np.expm1(-losses), dtype=np.float64)


def inverse_probs(probs: NDArray[np.float64], num_samples: int) -> NDArray[np.float64]:
    r"""Weigh drawn samples so that the mean of a batch estimates the mean over all (Eq. 3).

    .. math:: w_j = p_j / q_j = 1 / (N q_j)

    Parameters
    ----------
    probs : ndarray of float64, shape (batch,)
        Probability :math:`q_j` with which each drawn sample was drawn, greater than 0.
    num_samples : int
        Size N of the set drawn from.

    Returns
    -------
    ndarray of float64, shape (batch,)
        Weights with expectation 1.

    Examples
    --------
    >>> inverse_probs(np.array([0.5, 0.125]), 4)
    array([0.5, 2. ])
    """
    return 1.0 / (num_samples * probs)
