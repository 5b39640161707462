"""How long rounds and runs take (sections 3.2 and 4.5): stragglers, estimate, expectation."""

import math
from dataclasses import dataclass, field
from logging import DEBUG, INFO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.tifl.algorithm import Floats, TierState
from flwr_hetero.tifl.pacing import free_draws, schedule

STATE = {
    **dict.fromkeys(("paper_s", "exact_s", "actual_s", "within_s2", "between_s2"), float),
    **dict.fromkeys(("slowest_s", "slowest_s2"), ((-1,), "f")),
}
"""Entries of a saved TimeEstimate."""


def straggler_chance(num_nodes: int, num_slowest: int, num_selected: int) -> float:
    r"""Compute the probability that a random round holds a node of the slowest level (Eq. 2, 3).

    .. math:: Pr_s = 1 - \binom{|K| - |\tau_m|}{|C|} / \binom{|K|}{|C|}

    >>> round(straggler_chance(50, num_slowest=10, num_selected=5), 4)
    0.6894
    """
    chosen = check_count("num_selected", num_selected, 1)
    if not 0 <= num_slowest <= num_nodes or chosen > num_nodes:
        raise invalid("num_nodes", num_nodes, f"be at least {max(num_slowest, chosen)}")
    return 1 - math.comb(num_nodes - num_slowest, chosen) / math.comb(num_nodes, chosen)


def straggler_bound(num_nodes: int, num_slowest: int, num_selected: int) -> float:
    r"""Bound that probability from below (Theorem 3.1, Eq. 5); they are equal for one node.

    .. math:: Pr_s > 1 - ((|K| - |\tau_m|) / |K|)^{|C|}

    >>> round(straggler_bound(50, num_slowest=10, num_selected=5), 4)
    0.6723
    """
    return 1.0 - (1 - num_slowest / num_nodes) ** num_selected


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


def expected_round_times(
    rounds: Floats, tier: NDArray[np.int64], clients_per_round: int
) -> NDArray[np.float64]:
    """Compute the expected length of a round of each tier, as a mean over measured rounds.

    rounds: (sync_rounds, num_nodes), tier: (num_nodes,) -> (num_tiers,).

    The mean over rounds is right with jitter too: within one of them the nodes' latencies are as
    independent as in a training round.
    """
    members = [rounds[:, tier == j] for j in range(tier.max() + 1)]
    return np.array([np.mean([expected_slowest(r, clients_per_round) for r in m]) for m in members])


def mape(estimate: float, actual: float) -> float:
    """Compare an estimated training time with the actual one, in percent (Eq. 7)."""
    return abs(estimate - actual) / actual * 100


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
        """Estimate the rounds to come by these profiling rounds."""
        typical = np.nanmedian(np.where(tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        self.slowest_s = expected_round_times(filled, tier, clients_per_round)
        self.slowest_s2 = expected_round_times(filled**2, tier, clients_per_round)

    def expect(
        self, count: int, state: TierState, policy: str, probs: Floats | None = None
    ) -> None:
        """Add rounds by a policy's schedule; ``probs`` are those that a tier was drawn with."""
        if not len(self.slowest_s):
            return
        chances = schedule(state, policy, state.probs if probs is None else probs)
        mean_s = float(chances @ self.slowest_s)
        self.paper_s += paper_estimate(state.latency, chances, count)
        self.exact_s += count * mean_s
        self.within_s2 += count * float(chances @ (self.slowest_s2 - self.slowest_s**2))
        between_s2 = float(chances @ self.slowest_s**2) - mean_s**2
        independent = self.between_s2 + count * between_s2
        free = free_draws(state, policy, count if probs is None else 0)
        self.between_s2 = independent if free is None else free * between_s2

    def ahead(self, count: int, state: TierState, policy: str) -> Forecast:
        """Return how long rounds to come will take."""
        later = TimeEstimate(slowest_s=self.slowest_s, slowest_s2=self.slowest_s2)
        later.expect(count, state, policy)
        return later.forecast()

    def forecast(self) -> Forecast:
        """Return the estimate of the rounds added so far."""
        margin_s = 1.96 * math.sqrt(max(0.0, self.within_s2 + self.between_s2))
        return Forecast(self.exact_s, max(0.0, self.exact_s - margin_s), self.exact_s + margin_s)

    def log_forecast(self, count: int, state: TierState, policy: str) -> None:
        """Log how long rounds to come will take."""
        if len(self.slowest_s):
            text = "TiFL: %d rounds take about %s with the tiers' present probabilities"
            log(INFO, text, count, self.ahead(count, state, policy))

    def log_summary(self) -> None:
        """Log both estimates beside the actual time, if there is one."""
        if self.actual_s > 0 and self.exact_s > 0:
            text = "TiFL: expected %s, took %.4g s; by the paper's Eq. 6 %.4g s"
            log(DEBUG, text, self.forecast(), self.actual_s, self.paper_s)

    def info(self) -> dict[str, float]:
        """Return the sums so far, for the history."""
        return {
            "paper_estimate_s": self.paper_s,
            "exact_estimate_s": self.exact_s,
            "actual_s": self.actual_s,
        }
