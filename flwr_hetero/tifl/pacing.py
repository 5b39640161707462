"""Beyond TiFL's paper: tiers by their speed, and by their speed and accuracy, on NumPy arrays."""

import numpy as np

from flwr_hetero.tifl.algorithm import ADAPTIVE, PACED, Floats, TierState

PACE = 0.75
"""Power of the latency: with 1 every tier would have the same share of the run's time, with 0 the
same share of its rounds."""
ERROR_POWER = 2.0
"""Power of a tier's error in "adaptive" chances: with 0 accuracy would not matter."""
LEAST_ERROR = 0.1
"""A tier's error counts as at least so much of the largest, so that none is left out for good."""
MOST_DUE = 2.0
"""Rounds that a tier may be due, or ahead: one whose nodes were away does not make up for them."""


def paced_credits(latency: Floats) -> Floats:
    r"""Return the rounds of each tier in a period of the policy "paced".

    .. math:: c_j = \min(2^{T-1-j}, (\max_k L_k / L_j)^{0.75}) \text{, rounded}

    latency: (num_tiers,) -> (num_tiers,).

    >>> paced_credits(np.array([0.25, 0.5, 1.0, 2.0, 10.0]))
    array([16.,  8.,  4.,  2.,  1.])
    """
    most = 2.0 ** np.arange(len(latency))[::-1]
    return np.asarray(np.minimum(most, np.round(_times_faster(latency) ** PACE)))


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


def steer(state: TierState, accuracy: Floats | None, latency: Floats) -> TierState:
    """Average the accuracies with those so far, and set the probabilities by them: "adaptive".

    The last tier to train has a higher accuracy than it will keep: hence the average.

    >>> state = TierState(np.ones(2) / 2, np.full(2, np.nan), np.ones(2), np.ones(2))
    >>> steer(state, np.array([0.8, 0.6]), latency=np.ones(2)).probs
    array([0.2, 0.8])
    """
    if accuracy is None:
        accuracy = state.accuracy
    before = np.where(np.isnan(state.accuracy), accuracy, state.accuracy)
    accuracy = np.where(np.isnan(accuracy), before, (before + accuracy) / 2)
    return state._replace(accuracy=accuracy, probs=weigh_tiers(accuracy, latency))


def take_turns(due: Floats, change: Floats) -> Floats:
    """Add what each tier is due of a round, or take the round from the tier that trained.

    "adaptive" draws by what is due: a tier trains as often as its probability says, within about
    a round.

    >>> take_turns(np.array([0.5, 1.8]), np.array([0.6, 0.4]))
    array([1.1, 2. ])
    """
    return np.clip(due + change, -MOST_DUE, MOST_DUE)


def draw_weights(policy: str, state: TierState, due: Floats) -> Floats | None:
    """Return by which weights a policy of ours draws a tier: (num_tiers,), None for the others.

    Of "paced" these are the credits left, so that a period is a random permutation.

    >>> state = TierState(np.ones(2) / 2, np.full(2, np.nan), np.array([3.0, 1.0]), np.ones(2))
    >>> draw_weights("paced", state, due=np.zeros(2))
    array([3., 1.])
    """
    if policy == PACED:
        return state.credits if state.credits.any() else state.full_credits
    return np.maximum(due, 0.0) if policy == ADAPTIVE else None


def _times_faster(latency: Floats) -> Floats:
    seconds = np.maximum(latency, 1e-9)  # a clock may be too coarse to see any time
    return np.asarray(seconds.max() / seconds)
