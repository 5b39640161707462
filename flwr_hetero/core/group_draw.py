"""Mercury's two-level draw: groups by freshness, then samples by importance (section 4.1)."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.groups import Groups, relative_steps
from flwr_hetero.core.importance import mixed_probs


def group_probs(steps: NDArray[np.int64], beta: float) -> NDArray[np.float64]:
    r"""Prefer groups refreshed lately (Eq. 6).

    .. math:: r_i = \exp(\beta t_i) / \sum_n \exp(\beta t_n)

    Parameters
    ----------
    steps : ndarray of int64, shape (num_groups,)
        From :func:`relative_steps`.
    beta : float
        At least 0; 0 treats all groups alike.

    Returns
    -------
    ndarray of float64, shape (num_groups,)
        Probabilities that sum to 1.

    Examples
    --------
    >>> group_probs(np.array([0, -2, -1]), 1.0).round(3)
    array([0.665, 0.09 , 0.245])
    """
    powers = np.exp(beta * (steps - steps.max()))
    return np.asarray(powers / powers.sum(), dtype=np.float64)


def choose_groups(
    steps: NDArray[np.int64], beta: float, num_chosen: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Choose distinct groups one after the other by :func:`group_probs`.

    Parameters
    ----------
    steps, beta
        As for :func:`group_probs`.
    num_chosen : int
        d, at most the number of groups.
    rng : np.random.Generator
        Draws one Gumbel variable per group: the largest sums follow the law of successive
        draws without replacement, for any beta and without underflow.

    Returns
    -------
    ndarray of int64, shape (num_chosen,)
        Group numbers, in no particular order.

    Examples
    --------
    >>> sorted(choose_groups(np.array([0, -2, -1]), 100.0, 2, np.random.default_rng(0)).tolist())
    [0, 2]
    """
    keys = beta * steps + rng.gumbel(size=len(steps))
    chosen: NDArray[np.int64] = np.argsort(-keys, kind="stable")[:num_chosen]
    return chosen


def allocate(num_draws: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Share draws among groups in proportion to their sizes, at least one each.

    Parameters
    ----------
    num_draws : int
        At least the number of groups.
    sizes : ndarray of int64, shape (num_chosen,)
        Group sizes M_i.

    Returns
    -------
    ndarray of int64, shape (num_chosen,)
        Sums to ``num_draws``; ``num_draws * M_i / sum(M)`` up to rounding.

    Examples
    --------
    >>> allocate(8, np.array([4, 10, 2]))
    array([2, 5, 1])
    """
    exact = num_draws * sizes / sizes.sum()
    counts: NDArray[np.int64] = np.maximum(exact.astype(np.int64), 1)
    while counts.sum() < num_draws:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > num_draws:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts


def draw_batch(
    importance: NDArray[np.float64],
    groups: Groups,
    *,
    batch_size: int,
    num_chosen: int,
    beta: float,
    mixing: float,
    per_cycle: bool,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    r"""Build a mini-batch in two levels: d groups, then samples within each (section 4.1).

    Parameters
    ----------
    importance : ndarray of float64, shape (num_samples,)
        Cached importance I of every sample.
    groups : Groups
        The present ones.
    batch_size, num_chosen : int
        \|B\| draws from d groups, ``num_chosen <= batch_size``.
    beta : float
        Of Eq. 6.
    mixing : float
        Share of uniform draws within a group, see :func:`mixed_probs`.
    per_cycle : bool
        False: the paper's weight :math:`1 / (M_i q_{ij})`. True: weights that make the mean
        gradient unbiased over a cycle, :math:`D |B| / (d N n_i q_{ij})` with n_i draws from
        group i.
    rng : np.random.Generator
        Draws groups and samples, the latter with replacement.

    Returns
    -------
    indices : ndarray of int64, shape (batch_size,)
        Samples, group by group.
    weights : ndarray of float64, shape (batch_size,)
        The step is the mean of ``weights * losses``.

    Notes
    -----
    The paper's claim of an unbiased gradient (section 4.4) treats the chosen groups as if all
    were equally likely; Eq. 6 prefers fresh ones, and larger ones get a larger part of the
    batch. Over one cycle of D refreshes every group has every age once, is therefore chosen
    d times in the mean, whatever beta: counting it with its share M_i / N each time repairs
    both. The same number of batches must be drawn between any two refreshes.

    Examples
    --------
    >>> from flwr_hetero.core.groups import make_groups
    >>> rng = np.random.default_rng(0)
    >>> groups = make_groups(6, 2, rng)
    >>> indices, weights = draw_batch(np.ones(6), groups, batch_size=4, num_chosen=2, beta=1.0,
    ...     mixing=0.5, per_cycle=True, rng=rng)
    >>> weights
    array([1., 1., 1., 1.])
    """
    chosen = choose_groups(relative_steps(groups), beta, num_chosen, rng)
    counts = allocate(batch_size, groups.sizes[chosen])
    indices, weights = [], []
    for group, count in zip(chosen, counts, strict=True):
        members = groups.members(group)
        probs = mixed_probs(importance[members], mixing)
        drawn = rng.choice(len(members), size=count, p=probs)
        indices.append(members[drawn])
        share = batch_size * len(groups.sizes) / (num_chosen * count * len(groups.order))
        weights.append((share if per_cycle else 1.0 / len(members)) / probs[drawn])
    return np.concatenate(indices), np.concatenate(weights)
