r"""PGD's Algorithms 1 and 2 on NumPy arrays, and an unbiased draw by priority.

The priority of example i is :math:`p_i = \bar g \cdot g_i` (Eq. 8), the inner product of its
gradient with the sum of all gradients: how much a step on it alone lowers the whole loss.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

SMOOTHING = 0.8
"""The paper's lambda: weight of the newest slope (Eq. 12)."""
MAX_EXPONENT = 20.0
"""Bound of an extrapolation's exponent: an old trend must not overflow."""


class Trend(NamedTuple):
    """The paper's U: per example :math:`u = (p_j, a_j, j)`, all of shape (num_samples,)."""

    priority: Floats  # signed, NaN where unknown
    slope: Floats  # change of log|priority| per iteration
    computed_at: Indices  # the iteration j, -1 where unknown


def start_trend(num_samples: int) -> Trend:
    """Begin with nothing known about any example."""
    unknown = np.full(num_samples, np.nan)
    return Trend(unknown, np.zeros(num_samples), np.full(num_samples, -1, dtype=np.int64))


def choose_batch(
    trend: Trend, order: Indices, turn: int, iteration: int, *, num_renewed: int, num_top: int
) -> Indices:
    """Choose the examples whose gradients this iteration computes (Algorithm 1, lines 4 to 15).

    order: the round-robin; turn: examples taken from it so far -> those of S first, then of T.

    >>> trend = Trend(np.array([9.0, 5.0, 7.0, 1.0]), np.zeros(4), np.zeros(4, dtype=np.int64))
    >>> choose_batch(trend, np.array([3, 0, 1, 2]), 1, 1, num_renewed=1, num_top=2).tolist()
    [0, 1, 2]
    """
    # Alg. 1, l. 4: S
    renewed = order[(turn + np.arange(num_renewed)) % len(order)]
    # l. 13: all are estimated; those of S are computed in the training step, with those of T
    priority = estimate(trend, iteration)
    # l. 15: T
    return np.concatenate([renewed, pick_top(priority, num_top, taken=renewed)])


def pick_top(priority: Floats, num_top: int, taken: Indices) -> Indices:
    """Choose the examples of highest priority that are not taken (Algorithm 1, line 15).

    priority: (num_samples,), NaN counts as lowest -> (min(num_top, examples left),), ascending.

    >>> pick_top(np.array([0.5, 3.0, 2.0, np.nan]), 2, taken=np.array([1])).tolist()
    [0, 2]
    """
    # S and T do not overlap
    left = np.ones(len(priority), dtype=bool)
    left[taken] = False
    candidates = np.flatnonzero(left)
    if num_top >= len(candidates):
        return candidates
    known = np.where(np.isnan(priority), -np.inf, priority)[candidates]
    chosen = np.argpartition(known, -num_top)[-num_top:] if num_top else np.empty(0, np.int64)
    return np.sort(candidates[chosen])


def learn(trend: Trend, indices: Indices, priorities: Floats, iteration: int) -> Trend:
    r"""Update the trend of examples whose priority was computed (Algorithm 2, learn).

    .. math:: a_i = \lambda \frac{\ln p_i - \ln p_j}{i - j} + (1 - \lambda) a_j

    priorities: signed -> the trend of all examples. Not the paper's: where the two values have no
    common sign the trend starts flat, and a second value in one iteration keeps the slope.

    >>> trend = learn(start_trend(2), np.arange(2), np.array([8.0, 1.0]), iteration=0)
    >>> learn(trend, np.arange(2), np.array([2.0, -1.0]), iteration=2).slope.round(3)
    array([-0.555,  0.   ])
    """
    # (p_j, a_j, j)
    before, slope_before = trend.priority[indices], trend.slope[indices]
    age = iteration - trend.computed_at[indices]
    same_sign = before * np.sign(priorities) > 0  # False for NaN
    log_before, log_now = (
        np.log(np.abs(values), out=np.zeros(len(age)), where=same_sign)
        for values in (before, priorities)
    )
    # Alg. 2, l. 2 and 3
    newest = (log_now - log_before) / np.maximum(age, 1)
    slope = np.where(same_sign, SMOOTHING * newest + (1 - SMOOTHING) * slope_before, 0.0)
    # l. 4
    learned = Trend(trend.priority.copy(), trend.slope.copy(), trend.computed_at.copy())
    learned.priority[indices] = priorities
    learned.slope[indices] = np.where(age > 0, slope, slope_before)
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
    whole, count = priorities.sum(), max(1, round(top_ratio * len(priorities)))
    top = np.partition(priorities, -count)[-count:]
    return float(top.sum() / whole) if whole > 0 else float("nan")


def expected_counts(priority: Floats, mixing: float) -> Floats:
    r"""Return how often each example should occur in an epoch of N draws.

    .. math:: N q_i = (1 - \lambda) \, s_i / \bar s + \lambda, \qquad s_i = \sqrt{|p_i|}

    priority: (num_samples,), NaN where unknown, which counts as average; mixing: :math:`\lambda` in
    (0, 1] -> (num_samples,), with mean 1. Not the paper's: its top examples are biased. The root
    is the exponent of least variance among 1, 1/2 and 0.

    >>> expected_counts(np.array([9.0, -1.0, np.nan]), mixing=0.5)
    array([1.25, 0.75, 1.  ])
    """
    # in single precision, where priorities that have all but diverged must stay finite
    importance = np.sqrt(np.minimum(np.abs(priority), 1e76)).astype(np.float32)
    known = ~np.isnan(importance)
    mean = float(np.nansum(importance, dtype=np.float64)) / max(1, int(known.sum()))
    if mean == 0.0:
        return np.ones(len(priority))
    return (1.0 - mixing) * np.where(known, importance.astype(np.float64) / mean, 1.0) + mixing


def weighted_shuffle(counts: Floats, rng: np.random.Generator) -> Indices:
    """Draw an epoch in which each example occurs its count of times, rounded up or down.

    counts: of mean 1 -> as many examples, in random order; each count is the expected number.
    Systematic sampling: the counts are laid end to end in random order and every whole number
    after a random start picks the example that it falls on. With equal counts this is a
    permutation, so it keeps what reshuffling gains over independent draws.

    >>> rng = np.random.default_rng(0)
    >>> sorted(weighted_shuffle(np.array([2.0, 1.5, 0.5, 0.0]), rng).tolist())
    [0, 0, 1, 2]
    """
    num_samples = len(counts)
    order = rng.permutation(num_samples)
    edges = np.cumsum(counts[order])
    # of mean 1 up to rounding
    edges *= num_samples / edges[-1]
    edges[-1] = num_samples
    ticks = np.arange(num_samples) + rng.random()
    picked = np.searchsorted(edges, ticks, side="right").clip(max=num_samples - 1)
    return rng.permutation(order[picked])
