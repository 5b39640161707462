"""Algorithm 1: high-loss samples for fast nodes, uniform ones for slow nodes."""

import numpy as np
from numpy.typing import ArrayLike

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.loss_table import Indices, check_loss_table, high_loss_samples


def fast_share(num_steps: ArrayLike, fast: ArrayLike) -> float:
    r"""Part of an epoch that the fast nodes process (section 4.2).

    .. math:: N_F / N = \frac{\tau_F P_F}{\tau_F P_F + \tau_S P_S}

    Parameters
    ----------
    num_steps : array_like of int, shape (num_nodes,)
        Steps tau_i per round.
    fast : array_like of bool, shape (num_nodes,)
        Class of each node.

    Returns
    -------
    float
        In [0, 1].

    Examples
    --------
    >>> fast_share([32, 16], [True, False])
    0.6666666666666666
    """
    steps = np.asarray(num_steps, dtype=np.float64)
    if steps.size == 0 or np.any(steps < 1):
        raise invalid("num_steps", steps.tolist(), "be at least 1", "pass one count per node")
    return float(steps[np.asarray(fast, dtype=bool)].sum() / steps.sum())


def fast_allocation(
    losses: ArrayLike, num_fast: int, high_loss_fraction: float, rng: np.random.Generator
) -> Indices:
    """Choose the samples of the fast nodes (Algorithm 1, lines 3 to 5).

    Parameters
    ----------
    losses : array_like of float, shape (num_samples,)
        Latest loss per sample; NaN where none is recorded yet.
    num_fast : int
        Samples N_F to choose, at most num_samples.
    high_loss_fraction : float
        Lambda in (0, 1]: the part of N_F that goes by loss; the rest is a random fill from
        the samples not chosen yet.
    rng : np.random.Generator
        For the fill and the order.

    Returns
    -------
    ndarray of int64, shape (num_fast,)
        Distinct samples in random order.

    Raises
    ------
    ValueError
        If the table is empty, lambda is out of range or more samples are asked than there are.

    Notes
    -----
    Samples without a recorded loss are never high-loss; they come in by the fill only. The
    paper does not say what it does before the first loss: here that is uniform sampling.

    The fill is drawn from all that is left, so N_F = N gives every sample once whatever
    lambda is: the bias is in what the remaining N - N_F samples are, those of low loss.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.2.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sorted(fast_allocation([0.1, 0.9, 0.2, 0.8], 2, 1.0, rng).tolist())
    [1, 3]
    """
    num_samples = check_loss_table(losses)
    check_high_loss_fraction(high_loss_fraction)
    if not 0 <= num_fast <= num_samples:
        raise invalid("num_fast", num_fast, f"lie in [0, {num_samples}]", "there are no more")
    chosen = high_loss_samples(losses, int(np.rint(high_loss_fraction * num_fast)))
    fill = rng.choice(_others(num_samples, chosen), size=num_fast - chosen.size, replace=False)
    return rng.permutation(np.concatenate([chosen, fill]))


def slow_allocation(
    num_samples: int, num_slow: int, rng: np.random.Generator, taken: Indices | None = None
) -> Indices:
    """Choose the samples of the slow nodes (Algorithm 1, line 6): uniformly.

    Parameters
    ----------
    num_samples : int
        Size N of the data set.
    num_slow : int
        Samples N_S to choose.
    rng : np.random.Generator
        For the choice and its order.
    taken : ndarray of int64, optional
        Samples of the fast nodes, not to be drawn (unified sampling). None: draw from all,
        whatever the fast nodes got (separate sampling).

    Returns
    -------
    ndarray of int64, shape (num_slow,)
        Distinct samples; fewer than asked only if ``taken`` leaves fewer.

    References
    ----------
    .. [1] Lim et al., section 4.2 and appendix A.2 (Table 6).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sorted(slow_allocation(4, 2, rng, taken=np.array([1, 3])).tolist())
    [0, 2]
    """
    if not 0 <= num_slow <= num_samples:
        raise invalid("num_slow", num_slow, f"lie in [0, {num_samples}]", "there are no more")
    pool = np.arange(num_samples) if taken is None else _others(num_samples, taken)
    return rng.choice(pool, size=min(num_slow, pool.size), replace=False)


def epoch_sizes(num_samples: int, share: float) -> tuple[int, int]:
    """Divide an epoch's samples among fast and slow nodes.

    Parameters
    ----------
    num_samples : int
        Size N of the data set.
    share : float
        Part of the epoch that the fast nodes process, from :func:`fast_share`.

    Returns
    -------
    num_fast, num_slow : int
        N_F = round(share * N) and N_S = N - N_F, but at least 1 for a class that has nodes.

    Examples
    --------
    >>> epoch_sizes(100, 2 / 3), epoch_sizes(10, 0.999)
    ((67, 33), (10, 1))
    """
    if not 0 <= share <= 1:
        raise invalid("share", share, "lie in [0, 1]", "use fast_share")
    num_fast = int(np.rint(share * num_samples))
    return max(num_fast, int(share > 0)), max(num_samples - num_fast, int(share < 1))


def check_high_loss_fraction(value: float) -> None:
    """Refuse a lambda outside (0, 1].

    Examples
    --------
    >>> check_high_loss_fraction(0.0)
    Traceback (most recent call last):
    ...
    ValueError: high_loss_fraction must lie in (0, 1], got 0.0: ...
    """
    if not 0 < value <= 1:
        cure = "to sample uniformly, switch high-loss sampling off instead"
        raise invalid("high_loss_fraction", value, "lie in (0, 1]", cure)


def _others(num_samples: int, chosen: Indices) -> Indices:
    free = np.ones(num_samples, dtype=bool)
    free[chosen] = False
    return np.flatnonzero(free)
