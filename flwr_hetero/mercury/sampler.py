"""Mercury's sampler: batches by importance, with weights that keep the gradient unbiased."""

from typing import Any, ClassVar

import numpy as np

from flwr_hetero.client.batch_sampler import (
    FLOATS,
    INTS,
    Batch,
    BatchSampler,
    coverage_and_age,
)
from flwr_hetero.errors import check_choice
from flwr_hetero.mercury import algorithm
from flwr_hetero.mercury.algorithm import Floats, Groups, Indices
from flwr_hetero.state_dict import StateDict, check_state

ESTIMATORS = ("flat", "paper")
SCORES = ("importance", "loss")
NUM_GROUPS = 16  # D
NUM_CHOSEN = 4  # d: groups from which a batch of the paper's estimator is drawn
MIXING = 0.5  # share of uniform draws, so that no weight exceeds 2


class MercurySampler(BatchSampler):
    r"""Importance sampling whose weighted mean gradient stays unbiased.

    The latest score of each sample is cached: scores that training computes anyway, and those of
    the group that :meth:`refresh_indices` names, in turn. Samples never scored count as the others'
    average. A draw takes time in proportion to N: 0.6 ms for 60,000 samples. Zeng et al., SenSys
    2021, sections 4.1 and 4.3.

    Parameters
    ----------
    num_samples, batch_size, seed : int
        As of :class:`~flwr_hetero.sampler.BatchSampler`.
    estimator : {"flat", "paper"}
        ``flat`` draws over all samples with :math:`q = I / (2 \sum I) + 1 / (2 N)`
        and weighs by :math:`1 / (N q)`: unbiased at every step, however old the cache.
        ``paper`` draws in the paper's two levels and weighs to the letter: biased.
    scores : {"importance", "loss"}
        What :meth:`update` is given: importance to be used as it is, or cross-entropy losses,
        which are converted to the probability of a wrong answer.

    Examples
    --------
    >>> sampler = MercurySampler(4, 8, seed=0)
    >>> sampler.update(np.arange(4), np.array([6.0, 2.0, 0.0, 0.0]))
    >>> indices, weights = sampler.next_batch()
    >>> dict(sorted(zip(indices.tolist(), weights.tolist())))
    {0: 0.5, 1: 1.0, 2: 2.0, 3: 2.0}
    >>> group = sampler.refresh_indices()  # score these, then: sampler.update(group, scores)
    >>> len(group)
    1
    """

    settings = (*BatchSampler.settings, "estimator")
    schema: ClassVar[dict[str, Any]] = {"steps": int, "importance": FLOATS, "scored_at": INTS}
    learns = True

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        estimator: str = "flat",
        scores: str = "importance",
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.estimator = check_choice("estimator", estimator, ESTIMATORS)
        self.learns_from = check_choice("scores", scores, SCORES)
        num_groups = min(NUM_GROUPS, self.num_samples)
        self.groups = algorithm.make_groups(self.num_samples, num_groups, self.rng)
        self.importance = np.ones(self.num_samples)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.steps = 0

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; see the class for how."""
        self.steps += 1
        if self.estimator == "paper":
            num_chosen = min(NUM_CHOSEN, self.batch_size, len(self.groups.sizes))
            return algorithm.draw_two_level(
                self.importance, self.groups, self.batch_size, num_chosen, self.rng
            )
        indices = algorithm.draw_flat(self.importance, self.batch_size, MIXING, self.rng)
        probs = algorithm.mixed_probs(self.importance, MIXING)
        return indices, algorithm.inverse_probs(probs[indices], self.num_samples)

    def refresh_indices(self) -> Indices:
        """Return the samples of the group to score next, and pass the turn on (section 4.1)."""
        group = self.groups.members(self.groups.turn).copy()
        self.groups = algorithm.advance(self.groups)
        return group

    def resize_groups(self, size: int) -> None:
        """Cut the coming groups to ``size`` samples, such as can be scored on time (BACC)."""
        self.groups = algorithm.resize(self.groups, size)

    def update(self, indices: Indices, scores: Floats) -> None:
        """Cache new scores, at least 0, of the group named last or of the batch just trained on."""
        indices, scores = self.check_scores(indices, scores)
        algorithm.check_importance(scores)
        if self.learns_from == "loss":
            scores = algorithm.error_probability(scores)
        self.importance[indices] = scores
        self.scored_at[indices] = self.steps
        self._average_unscored()

    def _average_unscored(self) -> None:
        """Let samples that were never scored count as the others' average."""
        scored = self.scored_at >= 0
        if scored.any() and not scored.all():
            self.importance[~scored] = self.importance[scored].mean()

    def forget(self, indices: Indices) -> None:
        """Treat samples at these positions as never scored: other samples took their place."""
        self.scored_at[indices] = -1
        self._average_unscored()

    @property
    def coverage(self) -> float:
        """Share of the samples that were ever scored."""
        return float((self.scored_at >= 0).mean())

    def summary(self) -> dict[str, float]:
        """Describe the sampling for the history: coverage, and mean age in steps."""
        return coverage_and_age(self.scored_at, self.steps)

    def state_dict(self) -> StateDict:
        """Return sizes, generator, cache with ages, and groups: 20 bytes a sample."""
        groups = {f"group_{name}": value for name, value in self.groups._asdict().items()}
        return super().state_dict() | groups

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        groups = {"group_order": INTS, "group_bounds": INTS, "group_turn": int, "group_size": int}
        check_state(state, groups, type(self).__name__)
        # The parent makes the last check, so nothing changes before it.
        super().load_state_dict(state)
        saved: dict[str, Any] = {name: state[name] for name in groups}
        self.groups = Groups(*saved.values())
