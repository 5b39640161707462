"""How long rounds and runs take (section 4.5): the paper's estimate, and an expectation."""

import math
from dataclasses import dataclass, field
from logging import DEBUG, INFO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count
from flwr_hetero.tifl.algorithm import ADAPTIVE, PACED, Floats, TierState

STATE = {
    **dict.fromkeys(("paper_s", "exact_s", "actual_s", "within_s2", "between_s2"), float),
    **dict.fromkeys(("slowest_s", "slowest_s2"), ((-1,), "f")),
}
"""Entries of a saved TimeEstimate."""


def paper_estimate(tier_latency: Floats, tier_probs: Floats, num_rounds: int) -> float:
    r"""Estimate the training time from one latency per tier (Eq. 6).

    .. math:: L_{all} = \sum_i L_{tier_i} P_i R

    A round lasts as long as its slowest node, so that this is too low where latencies within a
    tier differ.
    """
    return float(np.dot(tier_latency, tier_probs)) * num_rounds


def expected_slowest(latency: Floats, num_selected: int) -> float:
    r"""Compute the expected latency of the slowest of c nodes drawn without replacement.

    .. math:: E[\max] = \sum_{k=c}^{n} l_{(k)} \binom{k-1}{c-1} / \binom{n}{c}

    With F(k) the probability that only the k fastest are drawn, F(n) = 1, F(k-1) = F(k) (1 - c/k)
    and the weight of l_(k) is F(k) c / k; sums of log1p neither overflow nor cancel.
    """
    check_count("num_selected", num_selected, 1)
    ordered = np.sort(latency)
    c = min(num_selected, len(ordered))
    k = np.arange(len(ordered), c, -1)  # slowest first
    log_f = np.concatenate([[0.0], np.cumsum(np.log1p(-c / k))])
    weights = np.exp(log_f) * c / np.append(k, c)
    return float(weights @ ordered[c - 1 :][::-1])


def expected_round_times(rounds: Floats, tier: NDArray[np.int64], count: int) -> Floats:
    """Compute the expected length of a round of each tier, as a mean over measured rounds.

    rounds: (num_measurements, num_nodes), tier: (num_nodes,) -> (num_tiers,).

    The mean over rounds is right with jitter too: within one of them the nodes' latencies are as
    independent as in a training round.
    """
    members = [rounds[:, tier == j] for j in range(tier.max() + 1)]
    return np.array([np.mean([expected_slowest(row, count) for row in m]) for m in members])


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
    """
    if policy == ADAPTIVE:
        return 1.0
    if policy != PACED:
        return None
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
    """Estimates and the actual time, added up round by round, and what a round of each tier takes.

    ``within_s2`` and ``between_s2`` are variances: of which nodes of a tier are drawn, and of which
    tiers are. ``slowest_s`` and ``slowest_s2``, mean and mean square of a round of each tier, are
    empty where no latency is known.
    """

    paper_s: float = 0.0
    exact_s: float = 0.0
    actual_s: float = 0.0
    within_s2: float = 0.0
    between_s2: float = 0.0
    slowest_s: Floats = field(default_factory=lambda: np.zeros(0))
    slowest_s2: Floats = field(default_factory=lambda: np.zeros(0))

    def set_tiers(self, rounds: Floats, tier: NDArray[np.int64], clients_per_round: int) -> None:
        """Estimate the rounds to come by these measurements."""
        typical = np.nanmedian(np.where(tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        self.slowest_s = expected_round_times(filled, tier, clients_per_round)
        self.slowest_s2 = expected_round_times(filled**2, tier, clients_per_round)

    def expect(
        self,
        count: int,
        state: TierState,
        latency: Floats,
        policy: str,
        probs: Floats | None = None,
    ) -> None:
        """Add rounds by a policy's schedule; ``probs`` are those that a tier was drawn with."""
        if not len(self.slowest_s):
            return
        chances = schedule(state, policy, state.probs if probs is None else probs)
        mean_s = float(chances @ self.slowest_s)
        self.paper_s += paper_estimate(latency, chances, count)
        self.exact_s += count * mean_s
        self.within_s2 += count * float(chances @ (self.slowest_s2 - self.slowest_s**2))
        between_s2 = float(chances @ self.slowest_s**2) - mean_s**2
        independent = self.between_s2 + count * between_s2
        free = free_draws(state, policy, count if probs is None else 0)
        self.between_s2 = independent if free is None else free * between_s2

    def ahead(self, count: int, state: TierState, latency: Floats, policy: str) -> Forecast:
        """Return how long rounds to come will take."""
        later = TimeEstimate(slowest_s=self.slowest_s, slowest_s2=self.slowest_s2)
        later.expect(count, state, latency, policy)
        return later.forecast()

    def forecast(self) -> Forecast:
        """Return the estimate of the rounds added so far."""
        margin_s = 1.96 * math.sqrt(max(0.0, self.within_s2 + self.between_s2))
        return Forecast(self.exact_s, max(0.0, self.exact_s - margin_s), self.exact_s + margin_s)
