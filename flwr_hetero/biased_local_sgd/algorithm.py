"""Biased local SGD, Lim et al.: Algorithm 1 on NumPy arrays, in the order of the listing."""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

SAME_CLASS_RATIO = 1.5
"""Neighbouring step times up to this ratio belong to one class."""


# --- l. 1: steps by speed ------------------------------------------------------------------


def fast_class(step_times_s: ArrayLike) -> tuple[NDArray[np.bool_], float]:
    r"""Split nodes into two classes, fast and slow, and compute their performance gap ratio.

    .. math:: \gamma = \max_{i \in F} t_i / \max_{i \in S} t_i

    The paper knows which device is a GPU. Here the widest relative gap between step times tells;
    where none exceeds ``SAME_CLASS_RATIO`` all measured nodes are fast.

    step_times_s: (num_nodes,), NaN where unknown -> (num_nodes,), False where unknown, and gamma
    in (0, 1], 1 if a class is empty.

    >>> fast_class([1.0, 8.0, 2.0, np.nan, 6.0])
    (array([ True, False,  True, False, False]), 0.25)
    """
    step_s = np.asarray(step_times_s, np.float64)
    known = np.sort(step_s[~np.isnan(step_s)])
    ratios = known[1:] / known[:-1]
    # The slowest node of a class decides, because the others wait for it.
    if not ratios.size or ratios.max() <= SAME_CLASS_RATIO:
        return ~np.isnan(step_s), 1.0
    slowest_fast = known[int(np.argmax(ratios))]
    return np.asarray(step_s <= slowest_fast), float(slowest_fast / known[-1])


def gamma_steps(gamma: ArrayLike, fast_steps: int) -> Indices:
    r"""Set steps in proportion to speed (Alg. 1, l. 1).

    .. math:: \tau_i = \lfloor \gamma_i \tau_F \rfloor

    gamma: (num_nodes,) in (0, 1], NaN where unknown -> (num_nodes,), 1 where unknown.

    >>> gamma_steps([1.0, 0.5, 1 / 22, np.nan], fast_steps=32)
    array([32, 16,  1,  1])
    """
    # The paper does not say how to round. Rounded down, a slow node delays no fast one.
    return _whole(np.asarray(gamma, np.float64) * fast_steps, fast_steps)


def timed_steps(
    limit_s: float, step_times_s: ArrayLike, transfer_times_s: ArrayLike, max_steps: int
) -> Indices:
    r"""Set the steps that fit between a node's download and its upload; not in the paper.

    .. math:: \tau_i = \lfloor (D - c_i) / t_i \rfloor

    Line 1 for any number of classes, and with the transfers counted.

    step_times_s, transfer_times_s: (num_nodes,), NaN where unknown
    -> (num_nodes,), at least 1, and 1 where the step time is unknown.

    >>> timed_steps(10.0, [0.5, 2.0, 20.0], [2.0, 0.0, 0.0], max_steps=32)
    array([16,  5,  1])
    """
    link_s = np.nan_to_num(np.asarray(transfer_times_s, np.float64))
    left_s = np.maximum(limit_s, link_s) - link_s
    return _whole(left_s / np.asarray(step_times_s, np.float64), max_steps)


def correction_scales(num_steps: ArrayLike, mean_steps: float, step_correction: float) -> Floats:
    r"""Compute the factors of updates that undo a power of the nodes' steps; not in the paper.

    .. math:: s_i = (\bar\tau / \tau_i)^q

    A node's data then count by :math:`\tau_i^{1 - q}`: with q = 1 as in FedAvg.

    >>> correction_scales([1, 4], 4.0, 1.0), correction_scales([1, 4], 4.0, 0.5)
    (array([4., 1.]), array([2., 1.]))
    """
    return np.asarray((mean_steps / np.asarray(num_steps, np.float64)) ** step_correction)


def _whole(steps: Floats, most: int) -> Indices:
    # The factor makes 29 steps of 0.29 * 100, and not 28.
    whole = np.floor(steps * (1 + 1e-9))
    return np.asarray(np.clip(np.nan_to_num(whole, nan=1), 1, most), np.int64)


# --- l. 3 to 6: which samples --------------------------------------------------------------


def fast_share(num_steps: ArrayLike, fast: ArrayLike) -> float:
    r"""Compute the part of an epoch that the fast nodes process (section 4.2).

    .. math:: N_F / N = \frac{\tau_F P_F}{\tau_F P_F + \tau_S P_S}

    num_steps, fast: (num_nodes,) -> in [0, 1].

    >>> fast_share([32, 16], [True, False])
    0.6666666666666666
    """
    steps = np.asarray(num_steps, np.float64)
    return float(steps[np.asarray(fast, bool)].sum() / steps.sum())


def epoch_sizes(num_samples: int, share: float) -> tuple[int, int]:
    """Compute the samples N_F and N_S of an epoch: at least 1 for a class that has nodes.

    >>> epoch_sizes(100, 2 / 3), epoch_sizes(10, 0.999)
    ((67, 33), (10, 1))
    """
    num_fast = int(np.rint(share * num_samples))
    return max(num_fast, int(share > 0)), max(num_samples - num_fast, int(share < 1))


def fast_allocation(
    losses: NDArray[np.floating], num_fast: int, high_loss_fraction: float, rng: np.random.Generator
) -> Indices:
    """Choose the samples of the fast nodes (Alg. 1, l. 3 to 5).

    A sample without a recorded loss enters by the random fill only. The bias lies in those that
    are left out: with N_F = N all samples are taken whatever lambda is.

    losses: (num_samples,), NaN where unknown -> (num_fast,), distinct, in random order.

    >>> rng = np.random.default_rng(0)
    >>> sorted(fast_allocation(np.array([0.1, 0.9, 0.2, 0.8]), 2, 1.0, rng).tolist())
    [1, 3]
    """
    # l. 3: lambda N_F of highest loss; at ties the lower index, NaN is sorted last
    num_high = min(int(np.rint(high_loss_fraction * num_fast)), int((~np.isnan(losses)).sum()))
    high = np.argsort(-losses, kind="stable")[:num_high]
    # l. 4: (1 - lambda) N_F of the others at random
    others = np.delete(np.arange(len(losses)), high)
    fill = rng.choice(others, size=num_fast - num_high, replace=False)
    # l. 5: in random order any division among the nodes is even
    return rng.permutation(np.concatenate([high, fill]))


def slow_allocation(
    num_samples: int, num_slow: int, rng: np.random.Generator, taken: Indices | None = None
) -> Indices:
    """Choose the samples of the slow nodes uniformly (Alg. 1, l. 6).

    taken: (num_fast,), samples to leave out (unified sampling, Table 6)
    -> (num_slow,) or what is left, distinct, in random order.

    >>> rng = np.random.default_rng(0)
    >>> sorted(slow_allocation(4, 2, rng, taken=np.array([1, 3])).tolist())
    [0, 2]
    """
    pool = np.arange(num_samples) if taken is None else np.delete(np.arange(num_samples), taken)
    return rng.choice(pool, size=min(num_slow, pool.size), replace=False)
