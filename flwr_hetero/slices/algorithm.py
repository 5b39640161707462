r"""FedSlice on NumPy arrays, for server model w of version t, average a, n nodes in flight.

::

    0: idle node i is asked with a chance that falls with its slice   draw_chances
    1: node i takes tau_i steps from (w_t + a) / 2, that fit a slice  slice_steps, TOWARDS
    2: its update d_i waits in a buffer                               asynchronous.engine
    3: when K = max(2, n // 4) wait:                                  buffer_size
       of alike nodes also all that come within one more slice        rule.SliceRule.due
    4:     w <- w + b sum_i (v_i / mean v) a(s_i) d_i / K             FedBuff; b: largest_step
    5:     a <- a + p_t (w - a)                                       new_part
    6: a round is over when the nodes trained as much as in FedAvg    rule.SliceRule
    7: late in the run tau_i become equal, and so do chances          ending, equal_steps
"""

from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIXED_SHARE, FIXED_SHARE_SHARED = 0.2, 1 / 9
"""Largest share of a message's fixed cost in a node's slice.

What a message costs a worker that nodes share is lost to all of them."""
QUICK = 0.9
"""Quantile of the nodes' steps that counts as a quick node's."""
TOWARDS = 0.5
"""Part of the average in the model that nodes train from."""
FIRST_STEPS = 2
"""Steps of a node that was never timed: the first one may hold a warm-up."""
ALIKE, ALIKE_SHARED = 1.5, 3.0
"""Largest ratio of a slow node's step time to a quick one's where nodes are alike.

On shared workers differences are mostly those of the machine's other work."""
MOST_PASSES, MOST_BATCHES, LEAST_BATCHES = 2.0, 2.0, 0.25
"""What is believed of a node's job, in medians of all: local epochs, and examples of a step."""
FIRST_MODELS = 5
"""Models of alike nodes that are not averaged; of later ones a fifth."""
ENDING_FROM, ENDING_JOBS = 0.35, (3.0, 18.0)
"""Part of a run after which its end begins, where each node trains many jobs; none where few."""
ENDING_RAMP, ENDING_FALL = 0.23, 0.385
"""Parts of a run's end: until steps are equal, and before server updates become smaller."""
LATE_PART = 0.3
"""Of the models since slices began to become equal, the part that is averaged."""
DISPATCH_S = 0.1
"""Seconds between two looks of Flower's simulation for messages that wait."""


class Ending(NamedTuple):
    """How far a run has gone over from slices of equal time to slices of equal steps."""

    equal: float = 0.0
    """Lambda, from 0 to 1."""
    step: float = 1.0
    """Factor of a server update's largest step, beside that of equal time."""


def ending(done: float, jobs: float, share: float) -> Ending:
    r"""Return how far a run has gone over to equal steps, which have FedAvg's objective.

    .. math:: u_0 = 1 - 0.65 \, \mathrm{clip}((J - 3) / 15), \quad
              v = \frac{u - u_0}{1 - u_0}, \quad
              \lambda = \mathrm{clip}(v / 0.23) \, \mathrm{clip}(1.5 - 2 n / N), \quad
              2 \cdot 4^{-\mathrm{clip}((v - 0.385) / 0.615)}

    done: u, the part of the run that is over; jobs: J, what each node trains in the run, in its
    jobs of FedAvg: in a short run the model is still far from where either objective ends; share:
    n / N, of the nodes that train at the same time. Where most do, fast nodes would have made many
    server updates before the equal steps of a slow one are done, which no longer fit the model.

    >>> ending(0.35, jobs=18, share=0.25), ending(1.0, jobs=18, share=0.25)
    (Ending(equal=0.0, step=2.0), Ending(equal=1.0, step=0.5))
    >>> ending(0.75, jobs=6, share=0.25).equal, ending(1.0, jobs=18, share=1.0).equal
    (0.0, 0.0)
    """
    few, many = ENDING_JOBS
    begin = 1 - (1 - ENDING_FROM) * _clipped((jobs - few) / (many - few))
    gone = (done - begin) / (1 - begin) if begin < 1 else 0.0
    falling = _clipped((gone - ENDING_FALL) / (1 - ENDING_FALL))
    return Ending(_clipped(gone / ENDING_RAMP) * _clipped(1.5 - 2 * share), float(2 * 4**-falling))


def _clipped(part: float) -> float:
    return min(1.0, max(0.0, part))


def usual_slice(slices_s: ArrayLike) -> float:
    """Return a short slice that is usual: the low quartile of (num_nodes,), 0 if there is none.

    >>> usual_slice([0.4, 0.4, 0.4, 1.6])
    0.4
    """
    known = np.asarray(slices_s, np.float64)
    return float(np.quantile(known, 0.25)) if known.size else 0.0


def draw_chances(slices_s: ArrayLike, usual_s: float, equal: float = 0.0) -> NDArray[np.float64]:
    r"""Return with what chance each idle node's turn counts, so that none holds more places.

    .. math:: c_i = \min(1, Q_{1/4}(T) / T_i)^{1 - \lambda}

    slices_s: (num_idle,), T, seconds from instruction to reply, NaN where unknown; usual_s: Q, of
    all nodes that are known, 0 if none is; equal: lambda -> (num_idle,), in (0, 1].

    >>> draw_chances([0.4, 1.6, np.nan], usual_s=0.4)
    array([1.  , 0.25, 1.  ])
    """
    # l. 0: a step of a slow node takes longer than a slice, and its message, too
    times_s = _zero_if_unknown(slices_s)
    if not usual_s:
        return np.ones(len(times_s))
    return np.asarray((usual_s / np.maximum(times_s, usual_s)) ** (1 - equal))


def slice_steps(
    quick_s: float,
    step_times_s: ArrayLike,
    fixed_times_s: ArrayLike,
    most: ArrayLike,
    share: float = FIXED_SHARE,
) -> NDArray[np.int64]:
    r"""Set the steps of each node's slice.

    .. math:: \tau_i = \min\left(\left\lfloor \frac{\max(S, c_i (1 - \rho) / \rho)}{t_i}
              \right\rfloor, m_i\right)

    quick_s: S, seconds of a quick node's steps; step_times_s, fixed_times_s: (num_nodes,), NaN
    where unknown; most: (num_nodes,), steps of FedAvg's job, infinite where unknown; share: rho
    -> (num_nodes,), at least 1, and 2 where the step time is unknown.

    >>> slice_steps(10.0, [0.5, 0.5, 20.0, np.nan], [0.0, 5.0, 0.0, np.nan], most=99)
    array([20, 40,  1,  2])
    """
    # l. 1: a slice is longer where a message's fixed cost is more than that share of it
    fixed_s = _zero_if_unknown(fixed_times_s)
    slice_s = np.maximum(quick_s, fixed_s * (1 - share) / share)
    steps = slice_s / np.asarray(step_times_s, np.float64)
    steps[np.isnan(steps)] = FIRST_STEPS
    # The factor makes 3 steps of 0.3 / 0.1, and not 2.
    whole = np.floor(np.minimum(steps, most) * (1 + 1e-9))
    return np.asarray(np.maximum(whole, 1), np.int64)


def seconds_of(
    steps: ArrayLike, step_times_s: ArrayLike, fixed_times_s: ArrayLike
) -> NDArray[np.float64]:
    """Return how long slices of so many steps take with their messages; each of (num_nodes,).

    >>> seconds_of([20, 2], step_times_s=[0.5, np.nan], fixed_times_s=[np.nan, np.nan])
    array([10., nan])
    """
    compute_s = np.asarray(steps) * np.asarray(step_times_s, np.float64)
    return np.asarray(compute_s + _zero_if_unknown(fixed_times_s))


def _zero_if_unknown(times_s: ArrayLike) -> NDArray[np.float64]:
    """Return a copy with 0 in place of NaN, which ``np.nan_to_num`` takes ten times as long for."""
    known = np.array(times_s, np.float64)
    known[np.isnan(known)] = 0.0
    return known


def quick_steps(steps: ArrayLike) -> float:
    """Return the steps of a quick node: a high quantile of (num_nodes,); 1 if there is none.

    >>> quick_steps([20, 20, 5])
    20.0
    """
    known = np.asarray(steps, np.float64)
    return float(np.quantile(known, QUICK)) if known.size else 1.0


def equal_steps(steps: ArrayLike, most: ArrayLike, quick: float, equal: float) -> NDArray[np.int64]:
    r"""Lengthen slices of few steps towards those of nearly the most.

    .. math:: \min(m_i, \max(\tau_i, \tau_i^{1 - \lambda} Q_{0.9}(\tau)^\lambda))

    steps: (num_nodes,), tau, of slices of equal time; most: (num_nodes,), m, steps of FedAvg's job;
    quick: Q, of all nodes' slices of equal time; equal: lambda -> (num_nodes,).

    >>> equal_steps([20, 20, 5], most=[99, 99, 10], quick=20.0, equal=0.5)
    array([20, 20, 10])
    >>> equal_steps([20, 20, 5], most=[99, 99, 10], quick=20.0, equal=0.0)
    array([20, 20,  5])
    """
    own = np.asarray(steps, np.float64)
    if not equal or not own.size:
        return np.asarray(own, np.int64)
    longer = np.rint(own ** (1 - equal) * quick**equal)
    return np.asarray(np.minimum(np.maximum(own, longer), np.maximum(own, most)), np.int64)


def buffer_size(in_flight: int) -> int:
    """Return the updates of a server update: a quarter of the nodes, at least 2.

    >>> [buffer_size(n) for n in (1, 3, 5, 20)]
    [1, 2, 2, 5]
    """
    # l. 3: K = max(2, n // 4), and no more than there are nodes
    return min(max(2, in_flight // 4), max(1, in_flight))


def places_in_flight(workers: int, job_s: float) -> int:
    r"""Return how many messages keep workers busy that take one at a time.

    .. math:: W + 1 + \left\lceil \frac{W D}{2 T} - 0.1 \right\rceil

    workers: W; job_s: T, seconds for a message. One waits for the next worker that is free, and one
    more for each that comes free before the server's answer, D / 2 later, is there.

    >>> places_in_flight(2, job_s=0.4), places_in_flight(2, job_s=0.05)
    (4, 5)
    """
    return workers + 1 + ceil(workers * DISPATCH_S / (2 * max(job_s, DISPATCH_S / 10)) - 0.1)


def are_alike(step_times_s: ArrayLike, ratio: float = ALIKE) -> bool:
    """Return whether nodes take about as long for a step: (num_nodes,), seconds.

    >>> are_alike([1.0, 1.1, 1.3]), are_alike([1.0, 1.1, 2.0])
    (True, False)
    """
    known = np.asarray(step_times_s, np.float64)
    return bool(known.size and np.quantile(known, QUICK) <= ratio * np.quantile(known, 1 - QUICK))


def spread_of(steps: ArrayLike) -> float:
    """Return how many steps a quick node takes, in means of (num_nodes,); 1 if there is none.

    >>> spread_of([10, 10, 10, 10]), round(spread_of([10, 1, 1, 1]), 3)
    (1.0, 2.246)
    """
    known = np.asarray(steps, np.float64)
    return quick_steps(known) / float(known.mean()) if known.size else 1.0


def largest_step(spread: float, num_updates: int, in_flight: int, momentum: float = 0.0) -> float:
    r"""Return the largest factor of a server update's mean.

    .. math:: \frac{1 - \mu}{1 + \mu} \frac{K}{n} \frac{\tau_{quick}}{\bar\tau}

    spread: the last factor, of all nodes' slices; momentum: the server's, which repeats an update 1
    / (1 - mu) times in all, on models that have moved since.

    >>> largest_step(1.0, num_updates=2, in_flight=4)
    0.5
    """
    # l. 4: all n nodes move the model no further than a quick one would; their sum overshoots
    return (1 - momentum) / (1 + momentum) * num_updates / in_flight * spread


class UsualJob(NamedTuple):
    """What most nodes would do in a round of FedAvg."""

    passes: float
    """Local epochs."""
    batch: float
    """Examples of a step."""


def believed_jobs(
    passes: ArrayLike, steps: ArrayLike, examples: ArrayLike, usual: UsualJob
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Cut what nodes say of their jobs to what most say: one node must not set a round's length.

    passes, steps, examples: (num_nodes,), of a node's job in FedAvg, infinite steps where unknown
    -> the same, with as many steps as give a believable number of examples in each.

    >>> usual = UsualJob(passes=1.0, batch=8.0)
    >>> [x.tolist() for x in believed_jobs([1, 9], [4, 1], [32, 288], usual)]
    [[1.0, 2.0], [4.0, 4.0], [32.0, 64.0]]
    """
    said, whole, size = (np.asarray(each, np.float64) for each in (passes, steps, examples))
    counted = np.minimum(said, MOST_PASSES * usual.passes)
    size = np.where(counted < said, size * counted / said, size)
    batches = size / whole
    possible = np.clip(batches, LEAST_BATCHES * usual.batch, MOST_BATCHES * usual.batch)
    # What is believed stays as it is, to the last bit.
    is_cut = (possible != batches) & (possible > 0)
    return counted, np.where(is_cut, size / np.where(is_cut, possible, 1.0), whole), size


def usual_job(
    passes: ArrayLike, steps: ArrayLike, examples: ArrayLike, *, early: bool = False
) -> UsualJob:
    """Return what is usual of all nodes' jobs; early: most of the few that are known may lie.

    >>> usual_job([1, 1, 1, 9], [4, 4, 4, 1], [32, 32, 32, 288])
    UsualJob(passes=1.0, batch=8.0)
    """
    said, whole, size = (np.asarray(each, np.float64) for each in (passes, steps, examples))
    usual_passes = _usual(said, early)
    counted = np.minimum(said, MOST_PASSES * usual_passes)
    size = np.where(counted < said, size * counted / said, size)
    return UsualJob(usual_passes, _usual(size / whole, early))


def _usual(values: NDArray[np.float64], early: bool) -> float:
    """Return the median; early at most twice the low quartile, as limits of updates do."""
    low, usual = (float(np.quantile(values, part, method="lower")) for part in (0.25, 0.5))
    return min(usual, 2 * low) if early else usual


def new_part(count: int, window: int, late: int = 0, *, alike: bool = False) -> float:
    r"""Return the newest model's part in the average of ``count`` models.

    .. math:: p_t = \left( \min\left(\sqrt{2 t - 1}, R\right) + 0.3 m \right)^{-1}

    late: m, of those the models since slices began to become equal.

    Of alike nodes at least min(1, 5 / t): a model of nearly all is as good as the average of a few.

    >>> [round(new_part(count, 32), 3) for count in (1, 5, 41, 2000)]
    [1.0, 0.333, 0.111, 0.031]
    >>> [round(new_part(count, 32, alike=True), 3) for count in (1, 5, 41, 2000)]
    [1.0, 1.0, 0.122, 0.031]
    """
    # l. 5: the first models are soon left out, and single ones weigh little
    part = 1 / (min(sqrt(2 * count - 1), window) + LATE_PART * late)
    return max(part, min(1.0, FIRST_MODELS / count)) if alike and window > 1 else part
