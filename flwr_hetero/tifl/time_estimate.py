"""How long a run will take: the paper's estimate and the exact expectation (TiFL, 4.5)."""

from collections.abc import Mapping
from logging import INFO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import invalid
from flwr_hetero.tifl.algorithm import Tiering


def paper_estimate(tier_latency: ArrayLike, tier_probs: ArrayLike, num_rounds: int) -> float:
    r"""Estimate the training time from one latency per tier (Eq. 6).

    .. math:: L_{all} = \sum_i L_{tier_i} P_i R

    Notes
    -----
    A round lasts as long as its slowest node, so the estimate is too low wherever the
    latencies within a tier differ; :func:`expected_round_time` is not.
    """
    latency, probs = np.asarray(tier_latency, float), np.asarray(tier_probs, float)
    return float(latency @ probs) * num_rounds


def expected_slowest(latencies: ArrayLike, num_selected: int) -> float:
    r"""Compute the expected latency of the slowest of c nodes drawn without replacement.

    .. math:: E[\max] = \sum_{k=c}^{n} l_{(k)} \binom{k-1}{c-1} / \binom{n}{c}

    Notes
    -----
    With F(k) the chance that no node beyond the k fastest is drawn, F(n) = 1 and
    F(k-1) = F(k) (1 - c/k); the weight of l_(k) is F(k) c / k. Taken as sums of log1p this
    neither overflows nor cancels with a million nodes.
    """
    ordered = np.sort(np.asarray(latencies, dtype=np.float64).ravel())
    if not len(ordered):
        raise invalid("latencies", [], "hold at least one node", "leave empty tiers out")
    if num_selected < 1:
        raise invalid("num_selected", num_selected, "be at least 1", "pass the nodes per round")
    c = min(num_selected, len(ordered))
    k = np.arange(len(ordered), c, -1)  # slowest first
    log_f = np.concatenate([[0.0], np.cumsum(np.log1p(-c / k))])
    weights = np.exp(log_f) * c / np.append(k, c)
    return float(weights @ ordered[c - 1 :][::-1])


def expected_round_time(
    latency: ArrayLike, tier: ArrayLike, tier_probs: ArrayLike, clients_per_round: int
) -> float:
    r"""Compute the expected length of a synchronous round that draws a tier, then nodes of it.

    .. math:: E[L_r] = \sum_j P_j \, E[\max_{i \in C} L_i \mid C \subset n_j]

    Notes
    -----
    Vanilla selection is one tier: ``tier`` all 0 and ``tier_probs=[1]``. That the mean over
    measured rounds is right with jitter: within one of them the nodes' latencies are as
    independent as in a training round.
    """
    measured, of_tier = np.atleast_2d(np.asarray(latency, np.float64)), np.asarray(tier)
    total = 0.0
    for j, prob in enumerate(np.asarray(tier_probs, np.float64)):
        if prob > 0:
            rows = measured[:, of_tier == j]
            total += prob * float(np.mean([expected_slowest(r, clients_per_round) for r in rows]))
    return float(total)


def mape(estimate: float, actual: float) -> float:
    """Compare an estimated training time with the actual one (Eq. 7)."""
    return abs(estimate - actual) / actual * 100


class TimeEstimate:
    """Add up, round by round, how long training should take and how long it takes."""

    def __init__(self) -> None:
        self.paper_s = self.exact_s = self.actual_s = 0.0
        self._typical = self._slowest = np.zeros(0)

    def measure(
        self, rounds: NDArray[np.float64], tiering: Tiering, clients_per_round: int
    ) -> None:
        """Take in a profiling."""
        typical = np.nanmedian(np.where(tiering.tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        self._typical = np.asarray(tiering.latency, np.float64)
        members = [filled[:, tiering.tier == j] for j in range(tiering.num_tiers)]
        self._slowest = np.array(
            [np.mean([expected_slowest(row, clients_per_round) for row in m]) for m in members]
        )

    def expect(self, chances: NDArray[np.float64]) -> None:
        """Add a round with these chances."""
        if len(self._typical) == len(chances):
            self.paper_s += float(np.dot(chances, self._typical))
            self.exact_s += float(np.dot(chances, self._slowest))

    def observe(self, seconds: float) -> None:
        """Add the time that a training round took."""
        self.actual_s += seconds

    def log_summary(self) -> None:
        """Log both estimates against the actual time, if there is one."""
        if self.actual_s > 0:
            for label, estimate_s in (("Eq. 6", self.paper_s), ("exact", self.exact_s)):
                log(
                    INFO,
                    "TiFL: %s estimate %.1f s, actual %.1f s, MAPE %.1f %%",
                    label,
                    estimate_s,
                    self.actual_s,
                    mape(estimate_s, self.actual_s),
                )

    def as_dict(self) -> dict[str, float]:
        """Return the sums so far, for the history."""
        return {
            "paper_estimate_s": self.paper_s,
            "exact_estimate_s": self.exact_s,
            "actual_s": self.actual_s,
        }

    def state(self) -> dict[str, object]:
        """Return all, JSON-able."""
        tiers = {"typical": self._typical.tolist(), "slowest": self._slowest.tolist()}
        return {**self.as_dict(), **tiers}

    def load(self, saved: Mapping[str, object]) -> None:
        """Continue from :meth:`state`."""
        self.paper_s = float(saved["paper_estimate_s"])  # type: ignore[arg-type]
        self.exact_s = float(saved["exact_estimate_s"])  # type: ignore[arg-type]
        self.actual_s = float(saved["actual_s"])  # type: ignore[arg-type]
        self._typical = np.asarray(saved["typical"], np.float64)
        self._slowest = np.asarray(saved["slowest"], np.float64)
