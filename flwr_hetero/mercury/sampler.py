"""Mercury's sampler: batches by importance, with weights that keep the gradient unbiased."""

from collections import deque
from typing import Any

import numpy as np

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, coverage_and_age
from flwr_hetero.errors import check_choice
from flwr_hetero.mercury import algorithm
from flwr_hetero.mercury.algorithm import Floats, Groups, Indices
from flwr_hetero.state_dict import StateDict, check_state

ESTIMATORS = ("flat", "paper")
SCORES = ("importance", "loss")
NUM_GROUPS = 16  # D
NUM_CHOSEN = 4  # d: groups from which a batch of the paper's estimator is drawn
LONGEST_STRIDE = 32  # batches
EPOCHS_PER_STRIDE = 1 / 8  # at most
MIXING = 0.5  # share of uniform draws, so that no weight exceeds 2


class MercurySampler(BatchSampler):
    r"""Importance sampling whose weighted mean gradient stays unbiased.

    The latest score of each sample is cached: scores that training computes anyway, and those of
    the group that :meth:`refresh_indices` names, in turn. Batches are drawn in strides of at most
    32 batches and 1/8 of an epoch. The scores of a batch take effect at the end of its stride,
    those of a group at once. Samples never scored count as the others' average. Zeng et al.,
    SenSys 2021, sections 4.1 and 4.3.

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
        # This draw is unused. Without it a seed would give other batches than in earlier versions.
        self.rng.permutation(self.num_samples)
        num_groups = min(NUM_GROUPS, self.num_samples)
        self.groups = algorithm.make_groups(self.num_samples, num_groups, self.rng)
        self._num_chosen = min(NUM_CHOSEN, num_groups, self.batch_size)
        self.importance = np.ones(self.num_samples)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.steps = 0
        self._awaits_group = False
        # Work on all N samples is done once per stride, for all its batches together.
        stride = EPOCHS_PER_STRIDE * self.num_samples / self.batch_size
        self.stride = int(np.clip(stride, 1, LONGEST_STRIDE))
        self._drawn_ahead: deque[Batch] = deque()
        # Scores that take effect at the end of the stride, and the number of their batches.
        self._pending: Batch = (np.empty(0, dtype=np.int64), np.empty(0))
        self._num_pending = 0
        # How many samples had a score when the average for the others was last taken.
        self._num_averaged = 0

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; see the class for how."""
        self.steps += 1
        if self.estimator == "paper":
            self._learn_pending()
            num_chosen = min(self._num_chosen, len(self.groups.sizes))
            return algorithm.draw_two_level(
                self.importance, self.groups, self.batch_size, num_chosen, self.rng
            )
        if not self._drawn_ahead:
            self._learn_pending()
            shape = (self.stride, self.batch_size)
            self._hold(algorithm.draw_flat(self.importance, shape, MIXING, self.rng))
        return self._drawn_ahead.popleft()

    def _hold(self, drawn: Indices) -> None:
        """Keep batches (num_batches, batch_size) for the next draws, with their weights."""
        probs = algorithm.mixed_probs(self.importance, MIXING)
        weights = algorithm.inverse_probs(probs[drawn], self.num_samples)
        self._drawn_ahead = deque(zip(drawn, weights, strict=True))

    def refresh_indices(self) -> Indices:
        """Return the samples of the group to score next, and pass the turn on (section 4.1)."""
        group = self.groups.members(self.groups.turn).copy()
        self.groups = algorithm.advance(self.groups)
        self._awaits_group = True
        return group

    def resize_groups(self, size: int) -> None:
        """Cut the coming groups to ``size`` samples, such as can be scored on time (BACC)."""
        self.groups = algorithm.resize(self.groups, size)

    def update(self, indices: Indices, scores: Floats) -> None:
        """Cache new scores, at least 0, of the group named last or of the batch just trained on."""
        indices, scores = self.check_scores(indices, scores)
        algorithm.check_importance(scores)
        if not len(indices):
            return
        if self.learns_from == "loss":
            scores = algorithm.error_probability(scores)
        # The scoring of a group may have been cut short.
        group = self.groups.members(self.groups.turn - 1)[: len(indices)]
        is_group = self._awaits_group and np.array_equal(indices, group)
        if is_group or len(indices) > self.batch_size:
            self._learn_pending()
            self._learn(indices, scores)
            self._awaits_group = False
            return
        pending, pending_scores = self._pending
        self._pending = (np.append(pending, indices), np.append(pending_scores, scores))
        self._num_pending += 1
        if self._num_pending >= self.stride:
            self._learn_pending()

    def _learn_pending(self) -> None:
        indices, scores = self._pending
        self._num_pending = 0
        if len(indices):
            self._pending = (indices[:0], scores[:0])
            self._learn(indices, scores)

    def _learn(self, indices: Indices, scores: Floats) -> None:
        # The state is saved in single precision.
        self.importance[indices] = scores.astype(np.float32)
        self.scored_at[indices] = self.steps
        # The average is taken again only when twice as many samples have a score.
        num_scored = np.count_nonzero(self.scored_at >= 0)
        if self.num_samples > num_scored >= 2 * self._num_averaged:
            self._average_unscored()
        self._drawn_ahead.clear()

    def _average_unscored(self) -> None:
        """Let samples that were never scored count as the others' average."""
        scored = self.scored_at >= 0
        self._num_averaged = int(np.count_nonzero(scored))
        if self._num_averaged:
            self.importance[~scored] = np.float32(self.importance[scored].mean())

    def forget(self, indices: Indices) -> None:
        """Treat samples at these positions as never scored: other samples took their place."""
        self._learn_pending()
        self.scored_at[indices] = -1
        self._average_unscored()
        self._drawn_ahead.clear()

    @property
    def coverage(self) -> float:
        """Share of the samples that were ever scored."""
        return float((self.scored_at >= 0).mean())

    def summary(self) -> dict[str, float]:
        """Describe the sampling for the history: coverage, and mean age in steps."""
        return coverage_and_age(self.scored_at, self.steps)

    def state_dict(self) -> StateDict:
        """Return sizes, generator, cache with ages, and groups: 12 bytes a sample."""
        groups = self.groups._replace(order=self.groups.order.astype(np.int32))._asdict()
        drawn = np.array([indices for indices, _ in self._drawn_ahead], np.int64)
        return super().state_dict() | {
            **{f"group_{name}": value for name, value in groups.items()},
            "awaits_group": self._awaits_group,
            "steps": self.steps,
            "importance": self.importance.astype(np.float32),
            "scored_at": self.scored_at.copy(),
            "num_averaged": self._num_averaged,
            "drawn": drawn.reshape(-1, self.batch_size),
            "pending_indices": self._pending[0],
            "pending_scores": self._pending[1],
            "num_pending": self._num_pending,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        counts = ("group_turn", "group_size", "steps", "num_averaged", "num_pending")
        schema: dict[str, object] = {
            "awaits_group": bool,
            **dict.fromkeys(counts, int),
            "group_order": ((self.num_samples,), "i"),
            "group_bounds": ((-1,), "i"),
            "scored_at": ((self.num_samples,), "i"),
            "importance": ((self.num_samples,), "f"),
            "pending_indices": ((-1,), "i"),
            "pending_scores": ((-1,), "f"),
            "drawn": ((-1, self.batch_size), "i"),
        }
        check_state(state, schema, "MercurySampler")
        saved: dict[str, Any] = {name: state[name] for name in schema}
        # The parent makes the last check, so nothing changes before it.
        super().load_state_dict(state)
        order = saved["group_order"].astype(np.int64)
        self.groups = Groups(order, saved["group_bounds"], saved["group_turn"], saved["group_size"])
        self.steps = saved["steps"]
        self._awaits_group = saved["awaits_group"]
        self.importance = saved["importance"].astype(np.float64)
        self.scored_at = saved["scored_at"].copy()
        self._num_averaged = saved["num_averaged"]
        self._num_pending = saved["num_pending"]
        self._pending = (saved["pending_indices"], saved["pending_scores"])
        self._hold(saved["drawn"])
