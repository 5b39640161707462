"""Estimated against actual training time of a tiered run (TiFL, section 4.5)."""

from collections.abc import Mapping
from logging import INFO

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_hetero.core.round_time import expected_slowest, mape
from flwr_hetero.core.tiers import Tiering


class TimeEstimate:
    """Add up, round by round, how long training should take and how long it takes.

    Attributes
    ----------
    paper_s : float
        Eq. 6: the chance of each tier times its typical latency.
    exact_s : float
        The chance of each tier times the expected slowest of |C| of its nodes.
    actual_s : float
        Time of the training rounds by the fleet's clock.

    Examples
    --------
    >>> estimate = TimeEstimate()
    >>> rounds = np.array([[1.0, 1.0, 4.0, 6.0]])
    >>> tiers = Tiering(np.array([0, 0, 1, 1]), np.array([2.5]), np.array([1.0, 5.0]))
    >>> estimate.measure(rounds, tiers, clients_per_round=2)
    >>> estimate.expect([0.5, 0.5])
    >>> estimate.paper_s, estimate.exact_s
    (3.0, 3.5)
    """

    def __init__(self) -> None:
        self.paper_s = self.exact_s = self.actual_s = 0.0
        self._typical = self._slowest = np.zeros(0)

    def measure(
        self, rounds: NDArray[np.float64], tiering: Tiering, clients_per_round: int
    ) -> None:
        """Take in a profiling.

        Parameters
        ----------
        rounds : ndarray of float64, shape (sync_rounds, num_nodes)
            Latency in seconds, NaN where a node did not answer.
        tiering : Tiering
            Tiers of these nodes.
        clients_per_round : int
            Nodes |C| per round.
        """
        typical = np.nanmedian(np.where(tiering.tier >= 0, rounds, 0.0), axis=0)
        filled = np.where(np.isnan(rounds), typical, rounds)
        self._typical = np.asarray(tiering.latency, np.float64)
        members = [filled[:, tiering.tier == j] for j in range(tiering.num_tiers)]
        self._slowest = np.array(
            [np.mean([expected_slowest(row, clients_per_round) for row in m]) for m in members]
        )

    def expect(self, chances: NDArray[np.float64]) -> None:
        """Add a round with these chances.

        Parameters
        ----------
        chances : array_like of float64, shape (num_tiers,)
            Chance of each tier in the draw.
        """
        if len(self._typical) == len(chances):
            self.paper_s += float(np.dot(chances, self._typical))
            self.exact_s += float(np.dot(chances, self._slowest))

    def observe(self, seconds: float) -> None:
        """Add the time that a training round took.

        Parameters
        ----------
        seconds : float
            By the fleet's clock.
        """
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
        """Continue from :meth:`state`.

        Parameters
        ----------
        saved : mapping
            As from :meth:`state`.
        """
        self.paper_s = float(saved["paper_estimate_s"])  # type: ignore[arg-type]
        self.exact_s = float(saved["exact_estimate_s"])  # type: ignore[arg-type]
        self.actual_s = float(saved["actual_s"])  # type: ignore[arg-type]
        self._typical = np.asarray(saved["typical"], np.float64)
        self._slowest = np.asarray(saved["slowest"], np.float64)
