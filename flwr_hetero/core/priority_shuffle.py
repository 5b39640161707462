"""Reshuffling by priority: an epoch that holds each example as often as its share says."""

import numpy as np
from numpy.typing import NDArray


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
