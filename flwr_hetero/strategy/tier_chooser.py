"""Which tier trains next: chances, credits and accuracies over a run (TiFL, Algorithm 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_hetero.core.adaptive_tiers import Rule, change_probs, should_change, start_credits
from flwr_hetero.core.errors import check_count, invalid
from flwr_hetero.core.tier_policy import draw_tier, normalise, policy_probs, resample

ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class ChooserSettings:
    """How tiers are chosen; see :class:`~flwr_hetero.strategy.TiFL` for the meaning.

    Raises
    ------
    ValueError
        If a setting is unknown or out of range.
    """

    policy: str | Sequence[float] = ADAPTIVE
    num_tiers: int = 5
    start_policy: str | Sequence[float] = "uniform"
    interval: int = 10
    trigger: str = "not-improved"
    rule: Rule = "rank"
    exponent: float = 1.0
    credits: int | Sequence[int] | str | None = None
    on_exhausted: str = "refill"

    def __post_init__(self) -> None:
        self.first_probs(self.num_tiers)
        start_credits(self.credits, self.num_tiers, num_rounds=1)
        check_count("interval", self.interval, 1, "10 looks every 10 rounds")
        if self.trigger not in ("not-improved", "always"):
            raise invalid("trigger", self.trigger, "be not-improved or always", "choose one")
        if self.on_exhausted not in ("refill", "ignore", "stop"):
            raise invalid(
                "on_exhausted", self.on_exhausted, "be refill, ignore or stop", "choose one"
            )
        change_probs(np.zeros(self.num_tiers), [True] * self.num_tiers, self.rule, self.exponent)

    @property
    def is_adaptive(self) -> bool:
        """Whether the chances follow the tiers' accuracy."""
        return isinstance(self.policy, str) and self.policy == ADAPTIVE

    def first_probs(self, num_tiers: int) -> NDArray[np.float64]:
        """Return the chances that the run begins with.

        Parameters
        ----------
        num_tiers : int
            Tiers there are; custom probabilities for another number are resampled.

        Returns
        -------
        ndarray of float64, shape (num_tiers,)
            Sums to 1.
        """
        policy = self.start_policy if self.is_adaptive else self.policy
        if isinstance(policy, str):
            return policy_probs(policy, num_tiers)
        return resample(policy_probs(policy, self.num_tiers), num_tiers)


class TierChooser:
    """Draw a tier a round and keep its books.

    Parameters
    ----------
    settings : ChooserSettings
        Checked settings.
    num_tiers : int
        Tiers there are.
    num_rounds : int or None
        Rounds of the run, for credits that are shares of it; None if nobody knows.
    latency : ndarray of float64, shape (num_tiers,), optional
        Typical latency of each tier in seconds, for credits that follow it.

    Attributes
    ----------
    probs : ndarray of float64, shape (num_tiers,)
        Current chance of each tier.
    credits : ndarray of float64, shape (num_tiers,)
        Rounds that each tier may still be chosen for.
    accuracy : ndarray of float64, shape (num_tiers,)
        Last known accuracy of each tier, NaN where unknown.
    """

    def __init__(
        self,
        settings: ChooserSettings,
        num_tiers: int,
        num_rounds: int | None,
        latency: NDArray[np.float64] | None = None,
    ) -> None:
        self.settings = settings
        self.probs = settings.first_probs(num_tiers)
        self.accuracy = np.full(num_tiers, np.nan)
        self.full_credits = self._full_credits(num_tiers, num_rounds, latency)
        self.credits = self.full_credits.copy()

    @classmethod
    def restored(cls, settings: ChooserSettings, saved: Mapping[str, Any]) -> "TierChooser":
        """Continue from :meth:`as_dict`, whatever the rounds and latencies were.

        Parameters
        ----------
        settings : ChooserSettings
            Checked settings.
        saved : mapping
            As from :meth:`as_dict`.

        Returns
        -------
        TierChooser
            With the books of the one that was saved.
        """
        chooser = cls(replace(settings, credits=None), len(saved["probs"]), None)
        chooser.settings = settings
        chooser.load(saved)
        return chooser

    def chances(self, possible: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of each tier in the next draw.

        Parameters
        ----------
        possible : ndarray of bool, shape (num_tiers,)
            Tiers that have nodes.

        Returns
        -------
        ndarray of float64, shape (num_tiers,)
            0 for tiers that are out; all 0 if every tier is.
        """
        eligible = possible & (self.credits > 0)
        chances = np.zeros(len(self.probs))
        if eligible.any():
            chances[eligible] = normalise(self.probs[eligible])
        return chances

    def choose(self, possible: NDArray[np.bool_], rng: np.random.Generator) -> int | None:
        """Draw a tier.

        Parameters
        ----------
        possible : ndarray of bool, shape (num_tiers,)
            Tiers that have nodes.
        rng : np.random.Generator
            Source of chance.

        Returns
        -------
        int or None
            The tier; None if no tier is possible, or credits are spent and that ends the run.
        """
        if not possible.any():
            return None
        if not (self.credits[possible] > 0).any() and not self._exhausted():
            return None
        return draw_tier(self.probs, possible & (self.credits > 0), rng)

    def spend(self, tier: int) -> None:
        """Take a credit from a tier that trains.

        Parameters
        ----------
        tier : int
            The tier.
        """
        self.credits[tier] -= 1

    def refund(self, tier: int) -> None:
        """Give the credit back to a tier of which nobody answered.

        Parameters
        ----------
        tier : int
            The tier.
        """
        self.credits[tier] += 1

    def learn(self, accuracy: NDArray[np.float64], current: int | None) -> None:
        """Take in the tiers' accuracies and change the chances if the trigger says so.

        Parameters
        ----------
        accuracy : ndarray of float64, shape (num_tiers,)
            Of this evaluation; NaN where no node answered, then the last figure stays.
        current : int or None
            Tier that trained last.
        """
        previous, self.accuracy = (
            self.accuracy,
            np.where(np.isnan(accuracy), self.accuracy, accuracy),
        )
        triggered = self.settings.trigger == "always" or (
            current is not None and should_change(accuracy[current], previous[current])
        )
        if triggered and not np.isnan(self.accuracy).all():
            everyone = np.ones(len(self.probs), np.bool_)
            self.probs = change_probs(
                self.accuracy, everyone, self.settings.rule, self.settings.exponent
            )
            log(INFO, "TiFL: tier chances are now %s", np.round(self.probs, 3).tolist())

    def take_over(self, old: "TierChooser") -> None:
        """Go on with the books of the tiers before a new profiling; credits refill as new.

        Parameters
        ----------
        old : TierChooser
            Of as many tiers.
        """
        full = self.full_credits
        self.load(old.as_dict())
        self.full_credits = full

    def as_dict(self) -> dict[str, Any]:
        """Return the books, JSON-able."""
        return {
            "probs": self.probs.tolist(),
            "accuracy": [None if np.isnan(a) else a for a in self.accuracy.tolist()],
            "credits": [None if np.isinf(c) else c for c in self.credits.tolist()],
            "full_credits": [None if np.isinf(c) else c for c in self.full_credits.tolist()],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`as_dict`.

        Parameters
        ----------
        saved : mapping
            As from :meth:`as_dict`.
        """
        self.probs = np.array(saved["probs"], np.float64)
        self.accuracy = np.array(saved["accuracy"], np.float64)  # None becomes NaN
        for name in ("credits", "full_credits"):
            figures = [np.inf if c is None else c for c in saved[name]]
            setattr(self, name, np.array(figures, np.float64))

    def _full_credits(
        self, num_tiers: int, num_rounds: int | None, latency: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        credits = self.settings.credits
        if isinstance(credits, str) and credits != "paced" and num_rounds is None:
            log(WARNING, "TiFL: credits=%r needs the number of rounds: no limit instead", credits)
            return np.full(num_tiers, np.inf)
        if credits is None or isinstance(credits, str):
            full = start_credits(credits, num_tiers, max(num_rounds or 1, 1), latency)
        else:
            full = start_credits(credits, self.settings.num_tiers, 1)
            full = np.ceil(resample(full, num_tiers)) if np.isfinite(full).all() else full
        if isinstance(credits, str) and credits == "paced":
            log(INFO, "TiFL: credits %s, refilled when spent", full.astype(int).tolist())
        elif num_rounds is not None and full.sum() < num_rounds:
            log(
                WARNING,
                "TiFL: %d credits for %d rounds; when they are spent: %s",
                full.sum(),
                num_rounds,
                self.settings.on_exhausted,
            )
        return full

    def _exhausted(self) -> bool:
        """Handle spent credits; tell whether the run can go on."""
        action = self.settings.on_exhausted
        log(INFO, "TiFL: no tier that has nodes has credits left: %s", action)
        if action == "stop":
            return False
        self.credits += np.inf if action == "ignore" else self.full_credits
        if action == "refill" and not (self.credits > 0).all():
            self.credits = np.maximum(self.credits, 1)  # tiers that began with none
        return True
