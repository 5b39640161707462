"""Beyond TiFL's paper: tiers by their speed, and by their speed and accuracy, on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from flwr_hetero.tifl.algorithm import (
    ADAPTIVE,
    ALGORITHM_2,
    PACED,
    Floats,
    TierState,
    policy_probs,
    resample,
    spread_over,
)

PACE = 0.75
"""Power of the latency in "paced" credits and "adaptive" chances: with 1 every tier would have the
same share of the run's time, with 0 the same share of its rounds."""
ERROR_POWER = 2.0
"""Power of a tier's error in "adaptive" chances: with 0 accuracy would not matter."""
MOST_DUE = 2.0
"""Rounds that a tier may be due, or ahead: one whose nodes were away does not make up for them."""
LEAST_ERROR = 0.1
"""A tier's error counts as at least so much of the largest, so that none is left out for good."""


def paced_credits(latency: Floats) -> Floats:
    r"""Return the rounds of each tier in a period of the policy "paced".

    .. math:: c_j = \min(2^{T-1-j}, (\max_k L_k / L_j)^{0.75}) \text{, rounded}

    latency: (num_tiers,) -> (num_tiers,).

    >>> paced_credits(np.array([0.25, 0.5, 1.0, 2.0, 10.0]))
    array([16.,  8.,  4.,  2.,  1.])
    >>> paced_credits(np.array([1.0, 1.1, 3.0]))
    array([2., 2., 1.])
    """
    most = 2.0 ** np.arange(len(latency))[::-1]
    return np.asarray(np.minimum(most, np.round(_times_faster(latency) ** PACE)))


def first_state(
    policy: str | Sequence[float], num_tiers: int, credits: list[int] | None, latency: Floats
) -> TierState:
    """Set probabilities and credits for tiers of this latency (Alg. 2, l. 1), maybe fewer tiers."""
    count, named = len(latency), isinstance(policy, str)
    probs = policy_probs(policy, count if named else num_tiers)
    full = paced_credits(latency) if policy == PACED else spread_over(count, credits)
    state = TierState.first(probs if named else resample(probs, count), full, latency)
    return steer(state, state.accuracy) if policy == ADAPTIVE else state


def carry_over(before: TierState, new: TierState, policy: str, *, with_credits: bool) -> TierState:
    """Go on with accuracies, and credits if wanted, where there are as many tiers as before."""
    if len(before.probs) != len(new.probs):
        return new
    new = new._replace(accuracy=before.accuracy, due=before.due)
    if with_credits:
        new = new._replace(credits=before.credits)
    if policy == ALGORITHM_2:
        new = new._replace(probs=before.probs)
    return steer(new, new.accuracy) if policy == ADAPTIVE else new


def draw_weights(state: TierState, policy: str) -> tuple[Floats, TierState]:
    """Return by which weights the tier of a round is drawn, (num_tiers,), and the state.

    Of "paced" these are the credits left, so that a period is a random permutation. With
    "adaptive" each tier is due as many rounds more as its probability says, and one less once it
    has trained (``was_drawn``): it trains as often as its probability says, within about a round.

    >>> state = TierState.first(np.array([0.7, 0.3]), np.array([3.0, 1.0]), latency=np.ones(2))
    >>> draw_weights(state, "paced")[0]
    array([3., 1.])
    """
    if policy == PACED:
        return (state.credits if state.credits.any() else state.full_credits), state
    if policy != ADAPTIVE:
        return state.probs, state
    due = np.minimum(state.due + state.probs, MOST_DUE)
    return np.maximum(due, 0.0), state._replace(due=due)


def schedule(state: TierState, policy: str, probs: Floats) -> Floats:
    """Return the probability of each tier in a round, (num_tiers,); ``probs`` if it was drawn.

    Of "paced" and "adaptive" it is the share of the schedule, whatever rounds were before.
    """
    if policy == PACED:
        return np.asarray(state.full_credits / state.full_credits.sum())
    return state.probs if policy == ADAPTIVE else probs


def free_draws(state: TierState, policy: str, num_rounds: int = 0) -> float | None:
    """Return how many independent draws the time of a run depends on; None: all of them.

    The first k of a random permutation of C rounds are as uncertain as k (C - k) / (C - 1)
    independent draws. ``num_rounds`` are still to come.

    >>> free_draws(TierState.first(np.ones(2) / 2, np.array([3.0, 1.0]), np.ones(2)), "paced", 5)
    1.0
    """
    if policy == ADAPTIVE:
        return 1.0
    if policy != PACED:
        return None
    whole = state.full_credits.sum()
    drawn = (whole - state.credits.sum() + num_rounds) % whole
    return float(drawn * (whole - drawn) / max(whole - 1, 1))


def was_drawn(state: TierState, tier: int) -> TierState:
    """Take a round from what is due to a tier."""
    due = np.maximum(state.due - (np.arange(len(state.due)) == tier), -MOST_DUE)
    return state._replace(due=due)


def weigh_tiers(accuracy: Floats, latency: Floats) -> Floats:
    r"""Weigh what a tier has still to learn against the time that its rounds take.

    .. math:: p_j \propto E_j^2 / L_j^{0.75}, \quad E_j = \max(e_j, 0.1 \max_k e_k)

    The error e is 1 less an accuracy (100 less one in percent), or the loss, which comes as a
    negative accuracy. A tier without one has the mean error of the others.

    accuracy: (num_tiers,), NaN where unknown, latency: (num_tiers,) -> (num_tiers,), sums to 1.

    >>> weigh_tiers(np.array([0.8, 0.6]), latency=np.array([1.0, 1.0]))
    array([0.2, 0.8])
    """
    known = accuracy[~np.isnan(accuracy)]
    weights = _times_faster(latency) ** PACE
    if len(known):
        best = 0.0 if known.max() <= 0 > known.min() else 1.0 if known.max() <= 1 else 100.0
        error = best - np.where(np.isnan(accuracy), known.mean(), accuracy)
        if error.max() > 0:
            weights = weights * np.maximum(error / error.max(), LEAST_ERROR) ** ERROR_POWER
    return np.asarray(weights / weights.sum())


def steer(state: TierState, accuracy: Floats) -> TierState:
    """Average the accuracies with those so far, NaN where unknown; set the probabilities by them.

    The last tier to train has a higher accuracy than it will keep: hence the average.

    >>> state = TierState.first(np.ones(2) / 2, np.full(2, np.inf), latency=np.array([1.0, 1.0]))
    >>> steer(state, np.array([0.8, 0.6])).probs
    array([0.2, 0.8])
    """
    before = np.where(np.isnan(state.accuracy), accuracy, state.accuracy)
    accuracy = np.where(np.isnan(accuracy), before, (before + accuracy) / 2)
    return state._replace(accuracy=accuracy, probs=weigh_tiers(accuracy, state.latency))


def _times_faster(latency: Floats) -> Floats:
    seconds = np.maximum(latency, 1e-9)  # a clock may be too coarse to see any time
    return np.asarray(seconds.max() / seconds)
