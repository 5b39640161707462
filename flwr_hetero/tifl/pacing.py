"""Pace: how long rounds and runs take (section 4.5), and policies of our own that go by it."""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from flwr_hetero.tifl.algorithm import ADAPTIVE, PACED, Floats, TierState
from flwr_hetero.tifl.tiers import Tiers

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

    >>> state = TierState(np.ones(2) / 2, np.full(2, np.nan), np.ones(2), np.ones(2))
    >>> steer(state, np.array([0.8, 0.6]), latency=np.ones(2)).probs
    array([0.2, 0.8])
    """
    if accuracy is None:
        accuracy = state.accuracy
    before = np.where(np.isnan(state.accuracy), accuracy, state.accuracy)
    # the last tier to train has a higher accuracy than it will keep
    accuracy = np.where(np.isnan(accuracy), before, (before + accuracy) / 2)
    return state._replace(accuracy=accuracy, probs=weigh_tiers(accuracy, latency))


def _times_faster(latency: Floats) -> Floats:
    # a clock may be too coarse to see any time
    seconds = np.maximum(latency, 1e-9)
    return np.asarray(seconds.max() / seconds)


# --- section 4.5: the time of rounds and runs ---------------------------------------------------


def paper_estimate(tier_latency: Floats, tier_probs: Floats, num_rounds: int) -> float:
    r"""Estimate the training time from one latency per tier (Eq. 6).

    .. math:: L_{all} = \sum_i L_{tier_i} P_i R

    A round lasts as long as its slowest node, so that this is too low where latencies within a
    tier differ.
    """
    return float(np.dot(tier_latency, tier_probs)) * num_rounds


def schedule(state: TierState, policy: str, drawn: Floats) -> Floats:
    """Return the probability of each tier in a round: (num_tiers,).

    Of "paced" and "adaptive" it is the share of the schedule, else what the tier is drawn by.
    """
    if policy == PACED:
        return np.asarray(state.full_credits / state.full_credits.sum())
    return state.probs if policy == ADAPTIVE else drawn


def free_draws(state: TierState, policy: str, num_rounds: int = 0) -> float | None:
    """Return how many independent draws the time of a run depends on; None: all of them.

    The first k of a random permutation of C rounds are as uncertain as k (C - k) / (C - 1)
    independent draws. ``num_rounds`` are still to come.
    """
    if policy != PACED:
        return 1.0 if policy == ADAPTIVE else None
    whole = state.full_credits.sum()
    drawn = (whole - state.credits.sum() + num_rounds) % whole
    return float(drawn * (whole - drawn) / max(whole - 1, 1))


class Forecast(NamedTuple):
    """Expected seconds, and the seconds between which 19 of 20 runs end."""

    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.seconds:.4g} s (95 %: {self.low:.4g} to {self.high:.4g} s)"


@dataclass
class TimeEstimate:
    """Estimates and the actual time, added up round by round.

    ``within_s2`` and ``between_s2`` are variances: of which nodes of a tier are drawn, and of which
    tiers are.
    """

    paper_s: float = 0.0
    exact_s: float = 0.0
    actual_s: float = 0.0
    within_s2: float = 0.0
    between_s2: float = 0.0

    def expect(
        self, count: int, tiers: Tiers, state: TierState, policy: str, drawn: Floats | None
    ) -> None:
        """Add rounds by a policy's schedule, or the one round that was drawn with these chances."""
        if not len(tiers.slowest_s):
            return
        chances = schedule(state, policy, state.probs if drawn is None else drawn)
        mean_s = float(chances @ tiers.slowest_s)
        self.paper_s += paper_estimate(tiers.seconds, chances, count)
        self.exact_s += count * mean_s
        self.within_s2 += count * float(chances @ (tiers.slowest_s2 - tiers.slowest_s**2))
        between_s2 = float(chances @ tiers.slowest_s**2) - mean_s**2
        independent = self.between_s2 + count * between_s2
        free = free_draws(state, policy, count if drawn is None else 0)
        self.between_s2 = independent if free is None else free * between_s2

    def forecast(self) -> Forecast:
        """Return the estimate of the rounds added so far."""
        margin_s = 1.96 * sqrt(max(0.0, self.within_s2 + self.between_s2))
        return Forecast(self.exact_s, max(0.0, self.exact_s - margin_s), self.exact_s + margin_s)
