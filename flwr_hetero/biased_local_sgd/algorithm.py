"""Biased local SGD, Lim et al.: Algorithm 1 on NumPy arrays, in the order of the listing."""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_count, check_number

Indices: TypeAlias = NDArray[np.int64]

SAME_CLASS_RATIO = 1.5
"""Neighbouring step times up to this ratio belong to one class."""


# --- l. 1: steps by speed ------------------------------------------------------------------


def fast_class(step_times_s: ArrayLike) -> NDArray[np.bool_]:
    """Split nodes into fast and slow at the widest relative gap between their step times.

    The paper knows which device is a GPU; here the times tell. All measured nodes are fast
    where no gap exceeds ``SAME_CLASS_RATIO``.

    step_times_s: (num_nodes,), NaN where unknown -> (num_nodes,), False where unknown.

    >>> fast_class([0.1, 3.0, 0.12, 2.5])
    array([ True, False,  True, False])
    """
    step_s = np.asarray(step_times_s, np.float64)
    known = np.sort(step_s[~np.isnan(step_s)])
    if known.size < 2:
        return ~np.isnan(step_s)
    ratios = known[1:] / known[:-1]
    widest = int(np.argmax(ratios))
    slowest_fast = known[widest] if ratios[widest] > SAME_CLASS_RATIO else known[-1]
    return np.asarray(step_s <= slowest_fast)


def class_gamma(step_times_s: ArrayLike, fast: ArrayLike) -> float:
    r"""Compute the performance gap ratio of the two classes.

    .. math:: \gamma = \max_{i \in F} t_i / \max_{i \in S} t_i

    The slowest node of a class decides, because it is the one that others wait for.

    step_times_s, fast: (num_nodes,), NaN where unknown -> in (0, 1], 1 if a class is empty.

    >>> class_gamma([1.0, 2.0, 4.0, 8.0], [True, True, False, False])
    0.25
    """
    step_s, is_fast = np.asarray(step_times_s, np.float64), np.asarray(fast, bool)
    measured = ~np.isnan(step_s)
    if not (measured & is_fast).any() or not (measured & ~is_fast).any():
        return 1.0
    return float(min(1.0, step_s[measured & is_fast].max() / step_s[measured & ~is_fast].max()))


def gamma_steps(gamma: ArrayLike, fast_steps: int, min_steps: int, max_steps: int) -> Indices:
    r"""Set steps in proportion to speed (Alg. 1, l. 1).

    .. math:: \tau_i = \lfloor \gamma_i \tau_F \rfloor

    The paper does not say how to round; rounded down, a slow node delays no fast one.

    gamma: (num_nodes,) in (0, 1], NaN where unknown -> (num_nodes,), min_steps where unknown.

    >>> gamma_steps([1.0, 0.5, 1 / 22, np.nan], 32, min_steps=1, max_steps=32)
    array([32, 16,  1,  1])
    """
    return _whole(np.asarray(gamma, np.float64) * fast_steps, min_steps, max_steps)


def deadline_steps(
    deadline_s: float,
    step_times_s: ArrayLike,
    transfer_times_s: ArrayLike,
    min_steps: int,
    max_steps: int,
) -> Indices:
    r"""Set the steps that fit between a node's download and its upload.

    .. math:: \tau_i = \lfloor (D - c_i) / t_i \rfloor

    Line 1 for any number of classes and with the link counted; not in the paper.

    step_times_s, transfer_times_s: (num_nodes,), NaN where unknown
    -> (num_nodes,), min_steps where the step time is unknown.

    >>> deadline_steps(10.0, [0.5, 2.0, 20.0], [2.0, 0.0, 0.0], min_steps=1, max_steps=32)
    array([16,  5,  1])
    """
    left_s = deadline_s - np.nan_to_num(np.asarray(transfer_times_s, np.float64))
    return _whole(left_s / np.asarray(step_times_s, np.float64), min_steps, max_steps)


def slice_steps(
    slice_s: float,
    step_times_s: ArrayLike,
    transfer_times_s: ArrayLike,
    traffic: float,
    min_steps: int,
    max_steps: int,
) -> Indices:
    r"""Set the steps that fit a time slice of which transfers take a limited share.

    .. math:: \tau_i = \lfloor (\max(S, c_i / \rho) - c_i) / t_i \rfloor

    For nodes that are not waited for, so that a slow link lengthens its own node's slice only.

    Shapes as of :func:`deadline_steps`; traffic: rho in (0, 1).

    >>> slice_steps(10.0, [0.5, 0.5, 20.0], [0.0, 5.0, 0.0], 0.25, min_steps=1, max_steps=99)
    array([20, 30,  1])
    """
    link_s = np.nan_to_num(np.asarray(transfer_times_s, np.float64))
    left_s = np.maximum(slice_s, link_s / traffic) - link_s
    return _whole(left_s / np.asarray(step_times_s, np.float64), min_steps, max_steps)


def normalised_scales(
    num_steps: ArrayLike, mean_steps: float, exponent: float = 1.0
) -> NDArray[np.float64]:
    r"""Compute the factors of updates that make nodes count as if all took the mean steps.

    .. math:: s_i = (\bar\tau / \tau_i)^q

    FedNova's idea, for plain SGD; not in the paper, whose nodes share one data set. With an
    exponent q below 1 a node's data count by :math:`\tau_i^{1 - q}`, and a few steps are less
    magnified, with their noise.

    >>> normalised_scales([1, 4], mean_steps=4.0), normalised_scales([1, 4], 4.0, 0.5)
    (array([4., 1.]), array([2., 1.]))
    """
    return np.asarray((mean_steps / np.asarray(num_steps, np.float64)) ** exponent)


def _whole(steps: NDArray[np.float64], low: int, high: int) -> Indices:
    whole = np.floor(steps * (1 + 1e-9))  # so that 0.29 * 100 is 29 steps and not 28
    return np.asarray(np.clip(np.nan_to_num(whole, nan=low), low, high), np.int64)


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

    lambda N_F samples of highest loss, and (1 - lambda) N_F of the others at random.
    A sample without a recorded loss enters by the random fill only, so that before the first
    loss sampling is uniform; the paper is silent. With N_F = N all samples are taken whatever
    lambda is: the bias lies in the N - N_F samples that are left out.

    losses: (num_samples,), NaN where unknown -> (num_fast,), distinct, in random order.

    >>> rng = np.random.default_rng(0)
    >>> sorted(fast_allocation(np.array([0.1, 0.9, 0.2, 0.8]), 2, 1.0, rng).tolist())
    [1, 3]
    """
    # l. 3: at ties the lower index; NaN is sorted last
    num_high = min(int(np.rint(high_loss_fraction * num_fast)), int((~np.isnan(losses)).sum()))
    high = np.argsort(-losses, kind="stable")[:num_high]
    # l. 4
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
    pool = np.arange(num_samples)
    if taken is not None:
        pool = np.delete(pool, taken)
    return rng.choice(pool, size=min(num_slow, pool.size), replace=False)


# --- section 4.5: convergence -------------------------------------------------------------


def largest_learning_rate(smoothness: float, num_steps: int) -> float:
    r"""Bound the learning rate (Lemma 1).

    .. math:: \eta \le 1 / (L \tau)

    smoothness: L, of the gradient's Lipschitz condition.

    >>> largest_learning_rate(smoothness=2.0, num_steps=32)
    0.015625
    """
    check_number("smoothness", smoothness, "(0, inf)")
    return 1 / (smoothness * check_count("num_steps", num_steps, 1))


def gradient_bound(
    decrease: float,
    learning_rate: float,
    num_rounds: int,
    *,
    smoothness: float,
    num_steps: int,
    variance: float,
) -> float:
    r"""Bound the mean squared gradient over rounds (Theorem 1).

    .. math:: 2 (F(x_0) - F(x_T)) / (\eta T) + L \eta \tau^2 \sigma_p^2

    The paper has it for any sampling p. Its proof drops a positive term, and biased sampling
    exceeds it: ``flwr-hetero reproduce biased-local-sgd theorem-1``.

    >>> gradient_bound(1.0, 0.5, 100, smoothness=1.0, num_steps=2, variance=0.25)
    0.54
    """
    noise = smoothness * learning_rate * num_steps**2 * variance
    return 2 * decrease / (learning_rate * num_rounds) + noise
