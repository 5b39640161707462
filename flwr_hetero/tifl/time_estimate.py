"""How long training will take: the paper's estimate and the exact expectation (section 4.5)."""

from dataclasses import dataclass, field
from logging import INFO

import numpy as np
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count
from flwr_hetero.tifl.algorithm import Floats, Tiering


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


@dataclass
class TimeEstimate:
    """Both estimates and the actual time, added up round by round, and the tiers' latencies."""

    paper_s: float = 0.0
    exact_s: float = 0.0
    actual_s: float = 0.0
    median_s: Floats = field(default_factory=lambda: np.zeros(0))
    slowest_s: Floats = field(default_factory=lambda: np.zeros(0))

    def set_tiers(self, rounds: Floats, tiering: Tiering, clients_per_round: int) -> None:
        """Estimate the rounds to come by these profiling rounds."""
        typical = np.nanmedian(np.where(tiering.tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        self.median_s = tiering.latency
        self.slowest_s = expected_round_times(filled, tiering.tier, clients_per_round)

    def expect_round(self, tier_probs: Floats) -> None:
        """Add a round whose tier was drawn with these probabilities."""
        if len(self.median_s):  # else no latency is known
            self.paper_s += paper_estimate(self.median_s, tier_probs, 1)
            self.exact_s += paper_estimate(self.slowest_s, tier_probs, 1)

    def log_summary(self) -> None:
        """Log both estimates against the actual time, if there is one."""
        if self.actual_s > 0 and len(self.median_s):
            for label, estimate_s in (("Eq. 6", self.paper_s), ("exact", self.exact_s)):
                error = mape(estimate_s, self.actual_s)
                text = "TiFL: %s estimate %.1f s, actual %.1f s, MAPE %.1f %%"
                log(INFO, text, label, estimate_s, self.actual_s, error)

    def info(self) -> dict[str, float]:
        """Return the sums so far, for the history."""
        return {
            "paper_estimate_s": self.paper_s,
            "exact_estimate_s": self.exact_s,
            "actual_s": self.actual_s,
        }
