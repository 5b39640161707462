"""How fast each node is: step times, two classes, the performance gap ratio gamma."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_count, invalid

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


ROUNDING_SLACK = 1e-9
"""So that 0.29 * 100 is 29 steps and not 28."""


def gamma_steps(
    gamma: ArrayLike, fast_steps: int, *, min_steps: int = 1, max_steps: int | None = None
) -> NDArray[np.int64]:
    r"""Give each node steps in proportion to its speed (Algorithm 1, line 1).

    .. math:: \tau_i = \max(\tau_{min}, \lfloor \gamma_i \tau_F \rfloor)

    Parameters
    ----------
    gamma : array_like of float, shape (num_nodes,)
        Performance gap ratio in (0, 1]: step time of a fast node over that of node i. NaN
        where unknown; such a node gets ``min_steps``, which is enough to measure it.
    fast_steps : int
        Steps of a fast node per round, tau_F.
    min_steps, max_steps : int
        Bounds; None is ``fast_steps``.

    Returns
    -------
    ndarray of int64, shape (num_nodes,)
        Steps per node, at least 1.

    Raises
    ------
    ValueError
        If a gamma is outside (0, 1] or a bound is not a positive integer.

    Notes
    -----
    The paper does not say how to round. We round down, so that a slow node never keeps the
    fast ones waiting unless its one step does.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.1.

    Examples
    --------
    >>> gamma_steps([1.0, 0.5, 1 / 22], fast_steps=32)
    array([32, 16,  1])
    """
    ratio = np.asarray(gamma, dtype=np.float64)
    if np.any((ratio <= 0) | (ratio > 1)):
        raise invalid("gamma", ratio.tolist(), "lie in (0, 1]", "it is fast time over slow time")
    low, high = check_bounds(fast_steps, min_steps, max_steps)
    return _whole_steps(ratio * fast_steps, low, high)


def deadline_steps(
    deadline_s: float,
    step_times_s: ArrayLike,
    transfer_times_s: ArrayLike = 0.0,
    *,
    min_steps: int = 1,
    max_steps: int | None = None,
) -> NDArray[np.int64]:
    r"""Give each node the steps that fit between its download and its upload.

    .. math:: \tau_i = \lfloor (D - c_i) / t_i \rfloor

    Parameters
    ----------
    deadline_s : float
        Length D of a round, in seconds.
    step_times_s : array_like of float, shape (num_nodes,)
        Seconds t_i per step; NaN where unknown, such a node gets ``min_steps``.
    transfer_times_s : array_like of float, shape (num_nodes,) or ()
        Seconds c_i on the link, both ways; NaN counts as 0.
    min_steps, max_steps : int
        Bounds; ``max_steps`` None is no upper bound.

    Returns
    -------
    ndarray of int64, shape (num_nodes,)
        Steps per node.

    Raises
    ------
    ValueError
        If the deadline or a step time is not positive, or a bound is not a positive integer.

    Notes
    -----
    Our generalisation: the paper has two classes and counts no link.

    Examples
    --------
    >>> deadline_steps(10.0, [0.5, 2.0, 20.0], [2.0, 0.0, 0.0])
    array([16,  5,  1])
    """
    if not (np.isfinite(deadline_s) and deadline_s > 0):
        raise invalid("deadline_s", deadline_s, "be positive and finite", "give it in seconds")
    step_s = check_times("step_times_s", step_times_s)
    low, high = check_bounds(max_steps or np.iinfo(np.int64).max, min_steps, max_steps)
    left_s = deadline_s - np.nan_to_num(np.asarray(transfer_times_s, dtype=np.float64))
    return _whole_steps(left_s / step_s, low, high)


def check_bounds(fast_steps: int, min_steps: int, max_steps: int | None) -> tuple[int, int]:
    """Check step counts; see :func:`gamma_steps` for their meaning.

    Returns
    -------
    tuple of int
        Lower and upper bound.

    Raises
    ------
    ValueError
        If a count is not a positive integer or the upper bound is below the lower.

    Examples
    --------
    >>> check_bounds(32, 1, None)
    (1, 32)
    """
    high = fast_steps if max_steps is None else max_steps
    for name, value in (("fast_steps", fast_steps), ("min_steps", min_steps), ("max_steps", high)):
        check_count(name, value, 1, "every node takes at least 1 step")
    if high < min_steps:
        raise invalid("max_steps", high, f"be at least min_steps={min_steps}", "raise it")
    return int(min_steps), int(high)


def _whole_steps(steps: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    whole = np.floor(np.nan_to_num(steps * (1 + ROUNDING_SLACK), nan=low))
    return np.clip(whole, low, min(high, 2**53)).astype(np.int64)


Indices: TypeAlias = NDArray[np.int64]


def high_loss_samples(losses: ArrayLike, count: int) -> Indices:
    """Find the samples with the highest recorded losses (Algorithm 1, line 3).

    Parameters
    ----------
    losses : array_like of float, shape (num_samples,)
        Latest loss per sample; NaN where none is recorded yet.
    count : int
        How many.

    Returns
    -------
    ndarray of int64, shape (at most count,)
        Highest first, at ties the lower index; only samples with a recorded loss.

    Examples
    --------
    >>> high_loss_samples([0.1, 2.0, np.nan, 0.7], 2)
    array([1, 3])
    """
    loss = np.asarray(losses, dtype=np.float64)
    known = np.flatnonzero(~np.isnan(loss))
    count = min(count, known.size)
    if not count:
        return np.empty(0, np.int64)
    threshold = np.partition(loss[known], -count)[-count]
    candidates = known[loss[known] >= threshold]
    highest = np.argsort(-loss[candidates], kind="stable")[:count]
    return np.asarray(candidates[highest], dtype=np.int64)


def record_losses(table: NDArray[np.floating], indices: ArrayLike, losses: ArrayLike) -> None:
    """Write the losses of processed samples into a table (Algorithm 1, line 14).

    Parameters
    ----------
    table : ndarray of float, shape (num_samples,)
        Latest loss per sample; changed in place.
    indices : array_like of int, shape (n,)
        Samples in ``range(num_samples)``; of a sample named twice the last loss stays.
    losses : array_like of float, shape (n,)
        Finite.

    Raises
    ------
    ValueError
        If shapes differ, an index is out of range or a loss is not finite; the table is then
        unchanged.

    Examples
    --------
    >>> table = np.full(3, np.nan)
    >>> record_losses(table, [2, 0], [0.5, 1.5])
    >>> table
    array([1.5, nan, 0.5])
    """
    index, loss = np.asarray(indices), np.asarray(losses, dtype=np.float64)
    if (
        index.ndim != 1
        or index.shape != loss.shape
        or (index.size and index.dtype.kind not in "iu")
    ):
        cure = "pass integer positions, one loss each"
        raise invalid("indices", f"{index.dtype} {index.shape}", "be integers, one per loss", cure)
    if index.size and (index.min() < 0 or index.max() >= table.size):
        span = (int(index.min()), int(index.max()))
        raise invalid("indices", span, f"lie in range({table.size})", "send what was handed out")
    if not np.isfinite(loss).all():
        raise invalid("losses", loss.tolist()[:3], "be finite", "lower the learning rate")
    table[index.astype(np.int64)] = loss


def check_loss_table(losses: ArrayLike) -> int:
    """Refuse an empty or misshapen loss table; return its length.

    Examples
    --------
    >>> check_loss_table([])
    Traceback (most recent call last):
    ...
    ValueError: losses must be a 1-D table with at least one sample, got shape (0,): ...
    """
    shape = np.shape(losses)
    if len(shape) != 1 or shape[0] == 0:
        rule = "be a 1-D table with at least one sample"
        raise ValueError(f"losses must {rule}, got shape {shape}: pass one entry per sample.")
    return int(shape[0])


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
