"""Mercury's sampler: batches by importance, with weights that keep the gradient unbiased."""

from typing import Any

import numpy as np

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, coverage_and_age
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.mercury import algorithm
from flwr_hetero.mercury.algorithm import Floats, Groups, Indices
from flwr_hetero.state_dict import StateDict, check_state

ESTIMATORS, SCORES = ("flat", "paper"), ("importance", "loss")
NUM_GROUPS, NUM_CHOSEN = 16, 4
"""Groups D, and groups d that a batch of the paper's estimator is drawn from."""
LONGEST_STRIDE, EPOCHS_PER_STRIDE = 32, 1 / 8
"""Batches in a stride, at most; and the part of an epoch that they may last."""
MIXING = 0.5
"""Share of uniform draws: no weight exceeds twice the mean."""


class MercurySampler(BatchSampler):
    r"""Importance sampling whose weighted mean gradient stays unbiased.

    Each example's latest score is cached: those that training computes anyway, and those of the
    group that :meth:`refresh_indices` names, in turn. Zeng et al., SenSys 2021, sections 4.1, 4.3.
    Batches are drawn in strides of at most 32 and 1/8 of an epoch, at whose end their scores take
    effect; those of a group do at once. Samples never scored count as the others' average.

    Parameters
    ----------
    num_samples, batch_size, seed : int
        As of :class:`~flwr_hetero.sampler.BatchSampler`.
    estimator : {"flat", "paper"}
        ``flat`` draws over all samples with :math:`q = I / (2 \sum I) + 1 / (2 N)`
        and weighs by :math:`1 / (N q)`: unbiased at every step, however old the cache.
        ``paper`` has the paper's two levels and weights to the letter: biased.
    scores : {"importance", "loss"}
        What :meth:`update` is given: importance to be used as it is, or cross-entropy losses,
        from which the probability of a wrong answer is taken as importance.

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
        # not used: a seed draws what it always drew
        self.rng.permutation(self.num_samples)
        num_groups = min(NUM_GROUPS, self.num_samples)
        self.groups = algorithm.make_groups(self.num_samples, num_groups, self.rng)
        self._num_chosen = min(NUM_CHOSEN, num_groups, self.batch_size)
        self.importance = np.ones(self.num_samples)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.steps, self._awaits_group = 0, False
        # work on all N samples is done once per stride: its batches are drawn and learnt together
        stride = EPOCHS_PER_STRIDE * self.num_samples / self.batch_size
        self.stride = int(np.clip(stride, 1, LONGEST_STRIDE))
        self._ready = np.empty((0, self.batch_size), dtype=np.int64)
        self._ready_weights = np.empty((0, self.batch_size))
        self._pending: Batch = (np.empty(0, dtype=np.int64), np.empty(0))
        # batches that are not learnt yet, and samples whose mean the others count as
        self._num_pending = self._num_averaged = 0

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; see the class for how."""
        self.steps += 1
        # section 4.1, step 2, to the letter
        if self.estimator == "paper":
            self._learn_pending()
            how = self.batch_size, min(self._num_chosen, len(self.groups.sizes)), self.rng
            return algorithm.draw_two_level(self.importance, self.groups, *how)
        if not len(self._ready):
            self._learn_pending()
            shape = (self.stride, self.batch_size)
            self._hold(algorithm.draw_flat(self.importance, shape, MIXING, self.rng))
        batch = self._ready[0], self._ready_weights[0]
        self._ready, self._ready_weights = self._ready[1:], self._ready_weights[1:]
        return batch

    def _hold(self, drawn: Indices) -> None:
        probs = algorithm.mixed_probs(self.importance, MIXING, drawn)
        self._ready, self._ready_weights = drawn, algorithm.inverse_probs(probs, self.num_samples)

    def refresh_indices(self) -> Indices:
        """Name the group to score next, as far as time allows, and pass the turn on."""
        # section 4.1, step 1: round-robin
        group = self.groups.members(self.groups.turn).copy()
        self.groups, self._awaits_group = algorithm.advance(self.groups), True
        return group

    def resize_groups(self, size: int) -> None:
        """Cut the coming groups to ``size`` samples, for instance to what the link hides."""
        self.groups = algorithm.resize(self.groups, size)

    def update(self, indices: Indices, scores: Floats) -> None:
        """Cache new scores, at least 0, of a refreshed group or of the batch just trained on."""
        indices, scores = self.check_scores(indices, scores)
        algorithm.check_importance(scores)
        if not len(indices):
            return
        if self.learns_from == "loss":
            scores = algorithm.error_probability(scores)
        last = self.groups.members(self.groups.turn - 1)[: len(indices)]
        is_group = self._awaits_group and np.array_equal(indices, last)
        if is_group or len(indices) > self.batch_size:
            self._learn_pending()
            self._learn(indices, scores)
            self._awaits_group = False
            return
        known, known_scores = self._pending
        self._pending = np.append(known, indices), np.append(known_scores, scores)
        self._num_pending += 1
        if self._num_pending >= self.stride:
            self._learn_pending()

    def _learn_pending(self) -> None:
        (indices, scores), self._num_pending = self._pending, 0
        if len(indices):
            self._pending = indices[:0], scores[:0]
            self._learn(indices, scores)

    def _learn(self, indices: Indices, scores: Floats) -> None:
        # in single precision, so that a saved cache is the cache
        self.importance[indices] = scores.astype(np.float32)
        self.scored_at[indices] = self.steps
        # samples never scored count as the others' mean, taken again when these have doubled
        num_scored = np.count_nonzero(self.scored_at >= 0)
        if self.num_samples > num_scored >= 2 * self._num_averaged:
            self._average_unscored()
        self._ready = self._ready[:0]

    def _average_unscored(self) -> None:
        scored = self.scored_at >= 0
        self._num_averaged = int(np.count_nonzero(scored))
        if self._num_averaged:
            self.importance[~scored] = np.float32(self.importance[scored].mean())

    def forget(self, indices: Indices) -> None:
        """Treat samples at these positions as never scored: others took their place."""
        self._learn_pending()
        self.scored_at[indices] = -1
        self._average_unscored()
        self._ready = self._ready[:0]

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
        return super().state_dict() | {
            "estimator": self.estimator,
            **{f"group_{name}": value for name, value in groups.items()},
            "awaits_group": self._awaits_group,
            "steps": self.steps,
            "importance": self.importance.astype(np.float32),
            "scored_at": self.scored_at.copy(),
            "num_averaged": self._num_averaged,
            "drawn": self._ready,
            "pending_indices": self._pending[0],
            "pending_scores": self._pending[1],
            "num_pending": self._num_pending,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        num, vector = self.num_samples, ((-1,), "i")
        counts = ("group_turn", "group_size", "steps", "num_averaged", "num_pending")
        schema = {
            **{"estimator": str, "awaits_group": bool, **dict.fromkeys(counts, int)},
            **dict.fromkeys(("group_order", "scored_at"), ((num,), "i")),
            **dict.fromkeys(("group_bounds", "pending_indices"), vector),
            **{"importance": ((num,), "f"), "pending_scores": ((-1,), "f")},
            "drawn": ((-1, self.batch_size), "i"),
        }
        check_state(state, schema, "MercurySampler")
        old: dict[str, Any] = {name: state[name] for name in schema}
        if old["estimator"] != self.estimator:
            raise invalid("estimator of the state", old["estimator"], f"be {self.estimator}")
        super().load_state_dict(state)
        # all fits: from here on nothing is refused
        order, bounds = old["group_order"].astype(np.int64), old["group_bounds"]
        self.groups = Groups(order, bounds, old["group_turn"], old["group_size"])
        self.steps, self._awaits_group = old["steps"], old["awaits_group"]
        self.importance = old["importance"].astype(np.float64)
        self.scored_at = old["scored_at"].copy()
        self._num_averaged, self._num_pending = old["num_averaged"], old["num_pending"]
        self._hold(old["drawn"])
        self._pending = old["pending_indices"], old["pending_scores"]
