r"""PGD's Algorithms 1 and 2 on NumPy arrays, and an unbiased draw by priority.

The priority of example i is :math:`p_i = \bar g \cdot g_i` (Eq. 8), the inner product of its
gradient with the sum of all gradients: how much a step on it alone lowers the whole loss.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

SMOOTHING = 0.8  # the paper's lambda: weight of the newest slope (Eq. 12)
MAX_EXPONENT = 20.0  # limit of an extrapolation, so that an old trend cannot overflow


class Trend(NamedTuple):
    """The paper's U: per example :math:`u = (p_j, a_j, j)`, all of shape (num_samples,)."""

    priority: Floats  # signed, NaN where unknown
    slope: Floats  # change of log|priority| per iteration
    computed_at: Indices  # the iteration j, -1 where unknown


def start_trend(num_samples: int) -> Trend:
    """Make a trend in which no priority is known."""
    unknown = np.full(num_samples, np.nan)
    return Trend(unknown, np.zeros(num_samples), np.full(num_samples, -1, dtype=np.int64))


def choose_batch(
    trend: Trend, order: Indices, turn: int, iteration: int, *, num_renewed: int, num_top: int
) -> Indices:
    """Choose the examples whose gradients this iteration computes (Algorithm 1, lines 4 to 15).

    order: the round-robin; turn: examples taken from it so far -> (num_renewed + num_top,), those
    of S first, then those of T.

    >>> trend = Trend(np.array([9.0, 5.0, 7.0, 1.0]), np.zeros(4), np.zeros(4, dtype=np.int64))
    >>> choose_batch(trend, np.array([3, 0, 1, 2]), 1, 1, num_renewed=1, num_top=2).tolist()
    [0, 1, 2]
    """
    # Alg. 1, l. 4: S
    renewed = order[(turn + np.arange(num_renewed)) % len(order)]
    # l. 13: examples of S are estimated too, because only the training step computes them.
    priority = estimate(trend, iteration)
    # l. 15: T
    return np.concatenate([renewed, pick_top(priority, num_top, taken=renewed)])


def pick_top(priority: Floats, num_top: int, taken: Indices) -> Indices:
    """Choose the examples of highest priority that are not taken (Algorithm 1, line 15).

    priority: (num_samples,), NaN counts as lowest -> (min(num_top, examples left),), ascending.

    >>> pick_top(np.array([0.5, 3.0, 2.0, np.nan]), 2, taken=np.array([1])).tolist()
    [0, 2]
    """
    is_left = np.ones(len(priority), dtype=bool)
    is_left[taken] = False
    candidates = np.flatnonzero(is_left)
    if num_top >= len(candidates):
        return candidates
    if num_top == 0:
        return candidates[:0]
    values = np.where(np.isnan(priority), -np.inf, priority)[candidates]
    chosen = np.argpartition(values, -num_top)[-num_top:]
    return np.sort(candidates[chosen])


def learn(trend: Trend, indices: Indices, priorities: Floats, iteration: int) -> Trend:
    r"""Update the trend of examples whose priority was computed (Algorithm 2, learn).

    .. math:: a_i = \lambda \frac{\ln p_i - \ln p_j}{i - j} + (1 - \lambda) a_j

    priorities: (len(indices),), signed -> the trend of all examples. Not in the paper: where the
    two values differ in sign the trend starts flat, and a second value in one iteration keeps the
    slope.

    >>> trend = learn(start_trend(2), np.arange(2), np.array([8.0, 1.0]), iteration=0)
    >>> learn(trend, np.arange(2), np.array([2.0, -1.0]), iteration=2).slope.round(3)
    array([-0.555,  0.   ])
    """
    # These are p_j, a_j and i - j.
    old_priority = trend.priority[indices]
    old_slope = trend.slope[indices]
    age = iteration - trend.computed_at[indices]
    # The comparison is false where the old priority is NaN.
    same_sign = old_priority * np.sign(priorities) > 0

    def log_of(values: Floats) -> Floats:
        return np.log(np.abs(values), out=np.zeros(len(age)), where=same_sign)

    # Alg. 2, l. 2 and 3
    newest = (log_of(priorities) - log_of(old_priority)) / np.maximum(age, 1)
    slope = np.where(same_sign, SMOOTHING * newest + (1 - SMOOTHING) * old_slope, 0.0)
    # l. 4
    learned = Trend(trend.priority.copy(), trend.slope.copy(), trend.computed_at.copy())
    learned.priority[indices] = priorities
    learned.slope[indices] = np.where(age > 0, slope, old_slope)
    learned.computed_at[indices] = iteration
    return learned


def estimate(trend: Trend, iteration: int) -> Floats:
    r"""Extrapolate every priority to this iteration (Algorithm 2, estimate).

    .. math:: p_i = p_j e^{a_j (i - j)}

    -> (num_samples,), signed; NaN where no priority was ever computed.

    >>> trend = Trend(np.array([4.0, -3.0]), np.array([-0.5, 0.0]), np.array([0, 0]))
    >>> estimate(trend, iteration=2).round(3)
    array([ 1.472, -3.   ])
    """
    # Alg. 2, l. 6
    exponent = np.clip(trend.slope * (iteration - trend.computed_at), -MAX_EXPONENT, MAX_EXPONENT)
    return trend.priority * np.exp(exponent)


def top_share(priorities: Floats, top_ratio: float) -> float:
    """Return the share of the loss decrease that the top examples account for (Figure 1b).

    priorities: (num_samples,); top_ratio: k in (0, 1], at least one example -> more than 1 where
    the others increase the loss, NaN where all together do not decrease it.

    >>> top_share(np.array([6.0, 1.0, -1.0, 2.0]), top_ratio=0.25)
    0.75
    """
    num_top = max(1, round(top_ratio * len(priorities)))
    top = np.partition(priorities, -num_top)[-num_top:]
    total = priorities.sum()
    return float(top.sum() / total) if total > 0 else float("nan")


def expected_counts(priority: Floats, mixing: float) -> Floats:
    r"""Return how often each example should occur in an epoch of N draws.

    .. math:: N q_i = (1 - \lambda) \, s_i / \bar s + \lambda, \qquad s_i = \sqrt{|p_i|}

    priority: (num_samples,), NaN where unknown, which counts as average; mixing: :math:`\lambda` in
    (0, 1] -> (num_samples,), with mean 1. Not in the paper, whose top examples are a biased draw.
    Of the exponents 1, 1/2 and 0 the square root has the least variance.

    >>> expected_counts(np.array([9.0, -1.0, np.nan]), mixing=0.5)
    array([1.25, 0.75, 1.  ])
    """
    # Priorities of a model that is about to diverge must stay finite in single precision.
    importance = np.sqrt(np.minimum(np.abs(priority), 1e76)).astype(np.float32)
    is_known = ~np.isnan(importance)
    mean = float(np.nansum(importance, dtype=np.float64)) / max(1, int(is_known.sum()))
    if mean == 0.0:
        return np.ones(len(priority))
    relative = np.where(is_known, importance.astype(np.float64) / mean, 1.0)
    return (1.0 - mixing) * relative + mixing


def weighted_shuffle(counts: Floats, rng: np.random.Generator) -> Indices:
    """Draw an epoch in which each example occurs as often as its count, rounded up or down.

    counts: (num_samples,), with mean 1; the expected number of times -> (num_samples,), in random
    order. Systematic sampling: the counts are laid end to end in random order, and every whole
    number after a random start picks the example that it falls on. With equal counts this is a
    permutation, so it keeps the gain of reshuffling over independent draws.

    >>> rng = np.random.default_rng(0)
    >>> sorted(weighted_shuffle(np.array([2.0, 1.5, 0.5, 0.0]), rng).tolist())
    [0, 0, 1, 2]
    """
    num_samples = len(counts)
    order = rng.permutation(num_samples)
    edges = np.cumsum(counts[order])
    # The mean of the counts is 1 only up to rounding.
    edges *= num_samples / edges[-1]
    edges[-1] = num_samples
    ticks = np.arange(num_samples) + rng.random()
    picked = np.searchsorted(edges, ticks, side="right").clip(max=num_samples - 1)
    return rng.permutation(order[picked])
