"""The unbiased rule of PGDSampler: reshuffling by priority, but only while that pays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, coverage_and_age
from flwr_hetero.client.gate import Moments, check_importance, observe, variance_ratio
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.algorithm import expected_counts, weighted_shuffle
from flwr_hetero.state_dict import StateDict, check_state

HARMLESS = 0.95
"""Least ratio of second moments under the stored priorities at which the gate stays open."""


class PriorityShuffle(BatchSampler):
    r"""The rule ``stochastic``: an epoch is a shuffle with example i about :math:`N q_i` times.

    While the gate is closed the batches are those of
    :class:`~flwr_hetero.sampler.UniformSampler` with the same seed. Priorities count from the
    next epoch on; the first one with the gate open begins at once.

    While few batches are measured most stored priorities are old or missing and say little about
    the gain with the gate open. So it opens by the *fresh* ratio, of draws by the priorities that
    a batch has just now, and stays open unless draws by the stored ones do harm.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int = 0, mixing: float, gate: float
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.mixing, self.gate = mixing, gate
        self.order = self.rng.permutation(self.num_samples)
        self.weights = np.ones(self.num_samples)
        self.position, self.by_priority, self.steps = 0, False, 0
        self.importance = np.zeros(self.num_samples, dtype=np.float32)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.moments = self.fresh = Moments()

    @property
    def is_open(self) -> bool:
        """Whether priorities pay, as far as measured."""
        pays = variance_ratio(self.fresh) >= self.gate and variance_ratio(self.moments) >= HARMLESS
        return self.gate == 0.0 or pays

    def next_batch(self) -> Batch:
        """Take the next entries of the epoch with their weights :math:`1 / (N q_i)`."""
        self.steps += 1
        if self.position >= self.num_samples or (self.is_open and not self.by_priority):
            self._begin_epoch()
        self.position = min(self.position + self.batch_size, self.num_samples)
        return self._last_batch()

    def _last_batch(self) -> Batch:
        part = slice((self.position - 1) // self.batch_size * self.batch_size, self.position)
        return self.order[part], self.weights[part]

    def _begin_epoch(self) -> None:
        self.position, self.by_priority = 0, self.is_open
        if self.by_priority:
            counts = self._counts()
            self.order = weighted_shuffle(counts, self.rng)
            self.weights = 1.0 / counts[self.order]
        else:
            self.order = self.rng.permutation(self.num_samples)
            self.weights = np.ones(self.num_samples)

    def _counts(self, index: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float64]:
        known = self.scored_at >= 0
        mean = float(self.importance.sum(dtype=np.float64)) / max(1, int(known.sum()))
        return expected_counts(self.importance[index], known[index], mean, self.mixing)

    def update(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        norms: NDArray[np.float64] | None = None,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        """Learn importance, the root of the priority's size, and measure what it gains."""
        index, priority = self.check_scores(indices, scores)
        score = np.sqrt(np.abs(priority))
        norm = score if norms is None else np.asarray(norms, dtype=np.float64)
        if norm.shape != score.shape:
            raise invalid("norms", norm.shape, f"have the shape of indices {score.shape}")
        check_importance(score)
        check_importance(norm)
        if len(index) == self.num_samples == len(np.unique(index)):
            # all by one model: the gain of the new probabilities is known exactly
            self._store(index, score)
            self.moments = self.fresh = Moments()
            self._measure(index, score, norm, np.ones(len(index)))
            if self.is_open:
                self.position = self.num_samples
        elif len(index):
            drawn = self._weights_of(index) if weights is None else weights
            self._measure(index, score, norm, drawn)
            self._store(index, score)

    def _measure(
        self,
        index: NDArray[np.int64],
        score: NDArray[np.float64],
        norm: NDArray[np.float64],
        drawn: NDArray[np.float64],
    ) -> None:
        """Observe both moments, by the stored priorities and by these fresh ones."""
        mean, mean_norm = (float(drawn @ part) / drawn.sum() for part in (score, norm))
        known = np.ones(len(index), dtype=bool)
        fresh = expected_counts(score.astype(np.float32), known, mean, self.mixing)
        relative = norm / (mean_norm or 1.0)  # norms shrink in training
        self.moments = observe(self.moments, relative, drawn, 1.0 / self._counts(index))
        self.fresh = observe(self.fresh, relative, drawn, 1.0 / fresh)

    def _weights_of(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights with which these were drawn; approximate for an earlier batch."""
        last, weights = self._last_batch()
        if np.array_equal(index, last):
            return weights
        return 1.0 / self._counts(index) if self.by_priority else np.ones(len(index))

    def _store(self, index: NDArray[np.int64], score: NDArray[np.float64]) -> None:
        self.importance[index], self.scored_at[index] = score, self.steps

    def summary(self) -> dict[str, float]:
        """Return coverage, mean age in batches, and the gate with its evidence."""
        return {
            **coverage_and_age(self.scored_at, self.steps),
            "effective-share": float(1.0 / (1.0 / self._counts()).mean()),
            "variance-ratio": variance_ratio(self.moments),
            "variance-ratio-fresh": variance_ratio(self.fresh),
            "importance-open": float(self.is_open),
        }

    def state_dict(self) -> StateDict:
        """Return sizes, generator, epoch, importance and evidence: 20 bytes a sample."""
        return super().state_dict() | {
            "order": self.order.astype(np.int32),
            "weights": self.weights.copy(),
            "importance": self.importance.copy(),
            "scored_at": self.scored_at.copy(),
            "position": self.position,
            "by_priority": self.by_priority,
            "steps": self.steps,
            "moments": np.array([*self.moments, *self.fresh]),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        num = self.num_samples
        schema = {
            "order": ((num,), "i"),
            "weights": ((num,), "f"),
            "importance": ((num,), "f"),
            "scored_at": ((num,), "i"),
            "moments": ((4,), "f"),
            "position": int,
            "steps": int,
            "by_priority": bool,
        }
        check_state(state, schema, "PriorityShuffle")
        old: dict[str, Any] = {name: state[name] for name in schema}
        order, weights, importance, scored_at, moments, position, steps, by_priority = old.values()
        inside = order.min() >= 0 and order.max() < num and 0 <= position <= num
        light = weights.min() > 0.0 and weights.max() <= 1.0 / self.mixing * (1 + 1e-6)
        counted = steps >= 0 and moments.min() >= 0.0 and np.isfinite(moments).all()
        if not (inside and light and counted):
            raise ValueError("state of PriorityShuffle must hold entries within their bounds.")
        check_importance(importance.astype(np.float64))
        super().load_state_dict(state)
        self.order, self.weights, self.position = order.astype(np.int64), weights.copy(), position
        self.importance, self.scored_at = importance.astype(np.float32), scored_at.astype(np.int32)
        self.by_priority, self.steps = by_priority, steps
        self.moments, self.fresh = Moments(*moments[:2].tolist()), Moments(*moments[2:].tolist())
