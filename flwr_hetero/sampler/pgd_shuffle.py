"""PGD's unbiased draw: reshuffling by priority, but only while that is worth it."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.gate import Moments, observe, variance_ratio
from flwr_hetero.core.importance import check_importance
from flwr_hetero.core.priority_shuffle import shares, weighted_shuffle
from flwr_hetero.sampler.batches import BatchSampler, StateDict

MEMORY = 2048.0
"""Measured examples after which the gate's evidence has faded to 1/e."""
HARMLESS = 0.95
"""Least ratio of second moments by what is known, with which the gate stays open."""


class PriorityShuffle(BatchSampler):
    r"""Each epoch is a shuffle in which an example stands about :math:`N q_i` times.

    Used through :class:`~flwr_hetero.sampler.PGDSampler`, which checks the other arguments.
    While the gate is closed the batches are those of
    :class:`~flwr_hetero.sampler.uniform.UniformSampler` with the same seed.

    Parameters
    ----------
    num_samples, batch_size, seed
        As for every sampler.
    mixing : float
        Share of uniform draws in (0, 1].
    gate : float
        Smallest ratio of the second moments of gradient norms, uniform over by priority, for
        which priorities are used, see the notes; 0 always uses them.

    Notes
    -----
    Priorities count from the next epoch on; the first one with the gate open begins at once.

    While few batches are measured most of what is known is old or missing and says little of
    what would be gained with the gate open. So it opens by the *fresh* ratio, of draws by the
    priorities that a batch has just now, and stays open unless draws by what is known would do
    harm (a ratio under 0.95).

    Examples
    --------
    >>> sampler = PriorityShuffle(4, 4, seed=0, mixing=0.5, gate=0)
    >>> sampler.update(np.arange(4), np.array([5.0, 1.0, 1.0, 1.0]))
    >>> indices, weights = sampler.next_batch()
    >>> sorted(zip(indices.tolist(), weights.round(2).tolist()))
    [(0, 0.57), (0, 0.57), (1, 1.33), (2, 1.33)]
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int = 0, mixing: float, gate: float
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        if not (np.isfinite(gate) and gate >= 0.0):
            raise invalid("gate", gate, "be at least 0 and finite", "0 takes its effect away")
        self.mixing, self.gate = float(mixing), float(gate)
        self.order = self.rng.permutation(self.num_samples)
        self.weights = np.ones(self.num_samples)
        self.position, self.by_priority = 0, False
        self.importance = np.zeros(self.num_samples, dtype=np.float32)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.moments = self.fresh = Moments()
        self.steps = 0

    @property
    def is_open(self) -> bool:
        """Whether priorities pay, as far as measured."""
        pays = variance_ratio(self.fresh) >= self.gate and variance_ratio(self.moments) >= HARMLESS
        return self.gate == 0.0 or pays

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next entries of the epoch with their weights :math:`1 / (N q_i)`."""
        self.steps += 1
        if self.position >= self.num_samples or (self.is_open and not self.by_priority):
            self._begin_epoch()
        self.position = min(self.position + self.batch_size, self.num_samples)
        return self._last_batch()

    def _last_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        part = slice((self.position - 1) // self.batch_size * self.batch_size, self.position)
        return self.order[part], self.weights[part]

    def _begin_epoch(self) -> None:
        self.position, self.by_priority = 0, self.is_open
        if self.by_priority:
            expected = self._shares()
            self.order = weighted_shuffle(expected, self.rng)
            self.weights = 1.0 / expected[self.order]
        else:
            self.order = self.rng.permutation(self.num_samples)
            self.weights = np.ones(self.num_samples)

    def update(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        norms: NDArray[np.float64] | None = None,
    ) -> None:
        """Learn importance, and look what drawing by it gains or would gain.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            A batch, or all examples.
        scores : ndarray of float64, shape (b,)
            Their importance, not negative.
        norms : ndarray of float64, shape (b,), optional
            Their gradient norms up to a common factor; the importance stands in for them.

        Raises
        ------
        ValueError
            If the arguments are unusable; the sampler is then unchanged.
        """
        index, score = self.check_scores(indices, scores)
        norm = score if norms is None else np.asarray(norms, dtype=np.float64)
        if norm.shape != score.shape:
            raise invalid("norms", norm.shape, f"have the shape {score.shape}", "pass one each")
        check_importance(score)
        check_importance(norm)
        if not len(index):
            return
        everything = len(index) == self.num_samples == len(np.unique(index))
        if everything:  # all by one model: the gain of the new shares is known exactly
            self._note(index, score)
            self.moments = self.fresh = Moments()
        expected = self._shares(index)
        drawn = np.ones(len(index)) if everything else self._weights_of(index, expected)
        mean, mean_norm = (float(drawn @ part) / drawn.sum() for part in (score, norm))
        fresh = shares(score.astype(np.float32), np.ones(len(index), bool), mean, self.mixing)
        relative = norm / (mean_norm or 1.0)  # norms shrink in training
        self.moments = observe(self.moments, relative, drawn, 1.0 / expected, MEMORY)
        self.fresh = observe(self.fresh, relative, drawn, 1.0 / fresh, MEMORY)
        if not everything:
            self._note(index, score)
        elif self.is_open:
            self.position = self.num_samples

    def _weights_of(
        self, index: NDArray[np.int64], expected: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the weights with which these were drawn; of an earlier batch about."""
        last, weights = self._last_batch()
        if np.array_equal(index, last):
            return weights
        return 1.0 / expected if self.by_priority else np.ones(len(index))

    def _note(self, index: NDArray[np.int64], score: NDArray[np.float64]) -> None:
        self.importance[index], self.scored_at[index] = score, self.steps

    def _shares(self, index: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float64]:
        known = self.scored_at >= 0
        mean = float(self.importance.sum(dtype=np.float64)) / max(1, int(known.sum()))
        return shares(self.importance[index], known[index], mean, self.mixing)

    def summary(self) -> dict[str, float]:
        """Describe the state of the sampling in a few figures.

        Returns
        -------
        dict of str to float
            ``coverage`` (share ever measured), ``mean-age`` (steps since, over those measured),
            ``effective-share`` (effective sample size of an epoch by priority, as a part of it),
            ``variance-ratio`` (second moment of gradient norms, uniform over by priority),
            ``variance-ratio-fresh`` (by priorities just measured) and ``importance-open``
            (0 or 1).
        """
        known = self.scored_at >= 0
        ages = self.steps - self.scored_at[known]
        return {
            "coverage": float(known.mean()),
            "mean-age": float(ages.mean()) if ages.size else 0.0,
            "effective-share": float(1.0 / (1.0 / self._shares()).mean()),
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
            "moment_uniform": self.moments.uniform,
            "moment_importance": self.moments.importance,
            "fresh_uniform": self.fresh.uniform,
            "fresh_importance": self.fresh.importance,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        try:
            vectors = {name: np.asarray(state[name]) for name in _VECTORS}
            position, steps = int(state["position"]), int(state["steps"])
            by_priority = bool(int(state["by_priority"]))
            moments, fresh = (
                Moments(float(state[f"{name}_uniform"]), float(state[f"{name}_importance"]))
                for name in ("moment", "fresh")
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"sampler state is damaged ({error!r}): start afresh.") from error
        if any(
            v.shape != (self.num_samples,) or v.dtype.kind != _VECTORS[n]
            for n, v in vectors.items()
        ):
            raise ValueError("sampler state holds vectors of another shape or kind: start afresh.")
        order, weights = vectors["order"].astype(np.int64), vectors["weights"].astype(np.float64)
        inside = (order >= 0).all() and (order < self.num_samples).all()
        light = (weights > 0.0).all() and (weights <= 1.0 / self.mixing * (1 + 1e-6)).all()
        figures = np.isfinite([*moments, *fresh]).all() and min(*moments, *fresh, steps) >= 0
        if not (inside and light and figures and 0 <= position <= self.num_samples):
            raise ValueError("sampler state holds impossible figures: start afresh.")
        check_importance(vectors["importance"].astype(np.float64))
        super().load_state_dict(state)
        self.order, self.weights, self.position = order, weights, position
        self.importance = vectors["importance"].astype(np.float32)
        self.scored_at = vectors["scored_at"].astype(np.int32)
        self.by_priority, self.steps = by_priority, steps
        self.moments, self.fresh = moments, fresh


_VECTORS = {"order": "i", "weights": "f", "importance": "f", "scored_at": "i"}
