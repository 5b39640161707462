"""Work for several batches at once: what costs a call per batch is paid once per stride."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.client.gate import Moments, check_importance, observe, variance_ratio
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.algorithm import inverse_probs

LONGEST = 32
"""Batches in a stride, at most: most of the gain, little delay."""


SHARE = 1 / 8
"""Part of an epoch that a stride may last: importance changes over epochs."""


class Stride:
    """Batches drawn ahead, and scores heard but not yet taken in."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.length = int(np.clip(SHARE * num_samples / batch_size, 1, LONGEST))
        self._batch_size = batch_size
        self._ahead: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._heard: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._num_heard = 0

    def draw_ahead(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Keep batches for later."""
        self._ahead = list(zip(indices, weights, strict=True))[::-1]

    def pop(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Give the next batch drawn ahead; None if there is none."""
        return self._ahead.pop() if self._ahead else None

    def drop(self) -> None:
        """Forget what was drawn ahead."""
        self._ahead = []

    def hear(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Keep the scores of a batch until the stride is full."""
        self._heard.append((indices, scores))
        self._num_heard += 1

    @property
    def is_full(self) -> bool:
        """Whether a stride of batches was heard of."""
        return self._num_heard >= self.length

    def take_in(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Give all that was heard, oldest first, and forget it; None if there is nothing."""
        if not self._heard:
            return None
        indices, scores = (np.concatenate(parts) for parts in zip(*self._heard, strict=True))
        self._heard, self._num_heard = [], 0
        return indices, scores

    def state(self) -> dict[str, NDArray[np.generic] | int]:
        """Return all that is needed to continue, flat."""
        ahead, heard = self._ahead, self._heard
        none, nothing = np.empty(0, np.int64), np.empty(0)
        return {
            "ahead_indices": np.concatenate([none, *(indices for indices, _ in ahead)]),
            "ahead_weights": np.concatenate([nothing, *(weights for _, weights in ahead)]),
            "heard_indices": np.concatenate([none, *(indices for indices, _ in heard)]),
            "heard_scores": np.concatenate([nothing, *(scores for _, scores in heard)]),
            "heard_batches": self._num_heard,
        }

    def restored(self, num_samples: int, state: Mapping[str, Any]) -> "Stride":
        """Make a stride like this one from :meth:`state`."""
        twin = Stride(num_samples, self._batch_size)
        pairs = []
        for name, values in (("ahead", "ahead_weights"), ("heard", "heard_scores")):
            indices = np.asarray(state[f"{name}_indices"], dtype=np.int64)
            numbers = np.asarray(state[values], dtype=np.float64)
            good = indices.shape == numbers.shape and (numbers >= 0.0).all()
            if not good or ((indices < 0) | (indices >= num_samples)).any():
                raise ValueError("sampler state holds impossible batches: start afresh.")
            pairs.append((indices, numbers))
        (indices, weights), heard = pairs
        size = self._batch_size
        if len(indices) % size:
            raise ValueError("sampler state holds part of a batch: start afresh.")
        starts = range(0, len(indices), size)
        twin._ahead = [(indices[i : i + size], weights[i : i + size]) for i in starts]
        twin._heard = [heard] if len(heard[0]) else []
        twin._num_heard = int(state["heard_batches"])
        return twin


FANOUT = 64
"""Values in a row; a level holds the sums of the rows below it."""


TOP = 4096
"""Longest list of sums that is searched as a whole, once for all points."""


class SumTree:
    """Non-negative values with their partial sums, kept current where values change.

    Setting or drawing b of n values costs ``b * FANOUT * log(n, FANOUT)`` operations plus
    ``TOP``; only building the tree costs n. Sums are recomputed from the values below and never
    carried along, so equal values give equal sums bit for bit, whatever the history.
    """

    def __init__(self, values: ArrayLike) -> None:
        leaves = np.asarray(values, dtype=np.float64)
        if leaves.ndim != 1 or not leaves.size:
            raise invalid("values", leaves.shape, "be a vector of at least one", "pass the scores")
        if not (leaves.min() >= 0.0 and leaves.max() < np.inf):
            bad = leaves[~(np.isfinite(leaves) & (leaves >= 0.0))][:3].tolist()
            raise invalid("values", bad, "be finite and not negative", "check the scores")
        self.size = leaves.size
        self._levels = [_rows_of(leaves)]
        self._top = self._levels[-1].sum(axis=1)
        while len(self._top) > TOP:
            self._levels.append(_rows_of(self._top))
            self._top = self._levels[-1].sum(axis=1)
        self.total = float(self._top.sum())

    @property
    def values(self) -> NDArray[np.float64]:
        """All values, shape (n,): a view, to be read only."""
        return self._levels[0].reshape(-1)[: self.size]

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Values at ``indices``."""
        return self.values[indices]

    def set(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Replace some values; where an index stands twice, the last value stays."""
        self._levels[0].reshape(-1)[indices] = values
        sums = [level.reshape(-1) for level in self._levels[1:]] + [self._top]
        for level, above in zip(self._levels, sums, strict=True):
            indices = indices // FANOUT
            if len(indices) > TOP:  # summing a row twice does no harm but costs memory
                indices = np.unique(indices)
            above[indices] = level[indices].sum(axis=1)
        self.total = float(self._top.sum())

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Map points of [0, 1) to indices, each index with a share value / total."""
        sums = np.cumsum(self._top)
        if sums[-1] <= 0.0:
            raise ValueError("all values are 0: there is nothing to draw.")
        # rounding may leave a point at or past the last sum: keep it inside, here and below
        rest = np.minimum(points * sums[-1], np.nextafter(sums[-1], 0.0))
        node: NDArray[np.int64] = sums.searchsorted(rest, side="right")
        rest = rest - sums[node - 1] * (node > 0)
        line = np.arange(len(points))
        for level in reversed(self._levels):
            sums = np.cumsum(level[node], axis=1)
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            child = np.count_nonzero(sums <= rest[:, None], axis=1)
            rest = rest - sums[line, child - 1] * (child > 0)
            node = node * FANOUT + child
        return node


def _rows_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Copy a vector into rows of FANOUT, the last one filled up with zeros."""
    rows = np.zeros((-(-values.size // FANOUT), FANOUT))
    rows.reshape(-1)[: values.size] = values
    return rows


DECILES = (10, 50, 90)


IMPORTANCE_PARTS = tuple(f"importance-with-mean-1.{share} % are below" for share in DECILES)
"""Names of the deciles in a summary; a plot's legend shows what follows the point."""


class ImportanceCache:
    r"""Latest importance per sample; samples never scored count as average.

    Drawing and updating cost as much as the samples drawn and updated, whatever N.

    Notes
    -----
    Importance is kept in single precision, so that a saved cache is the cache. The samples
    never scored are set to the average of the others each time these have doubled in number,
    which costs N operations at most log2(N) times in all.
    """

    def __init__(self, num_samples: int) -> None:
        self.scored_at = np.full(num_samples, -1, dtype=np.int32)
        self._tree = SumTree(np.ones(num_samples))
        self._num_scored = self._num_averaged = 0

    def __len__(self) -> int:
        return len(self.scored_at)

    @property
    def values(self) -> NDArray[np.float64]:
        """Importance of all samples, shape (num_samples,): a view, to be read only."""
        return self._tree.values

    @property
    def mean(self) -> float:
        """Mean importance."""
        return self._tree.total / len(self)

    @property
    def coverage(self) -> float:
        """Share of the samples that were ever scored."""
        return self._num_scored / len(self)

    def set(self, indices: NDArray[np.int64], scores: NDArray[np.float64], step: int) -> None:
        """Replace the importance of some samples."""
        check_importance(scores)
        if not len(indices):
            return
        self._tree.set(indices, scores.astype(np.float32).astype(np.float64))
        if self._num_scored < len(self):
            self._num_scored += int(np.count_nonzero(self.scored_at[np.unique(indices)] < 0))
        self.scored_at[indices] = step
        if len(self) > self._num_scored >= 2 * self._num_averaged:
            self._average_unscored()

    def forget(self, indices: NDArray[np.int64]) -> None:
        """Treat some samples as never scored, because other samples took their place."""
        self.scored_at[indices] = -1
        self._num_scored = int(np.count_nonzero(self.scored_at >= 0))
        self._num_averaged = min(self._num_averaged, self._num_scored)
        if self._num_scored:
            self._average_unscored()

    def _average_unscored(self) -> None:
        scored = self.scored_at >= 0
        values = self.values.copy()
        values[~scored] = np.float32(values[scored].mean())
        self._tree = SumTree(values)
        self._num_averaged = self._num_scored

    def draw(
        self, shape: tuple[int, int], mixing: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        r"""Draw batches of samples with replacement, a share of them uniformly.

        .. math:: q_j = (1 - \lambda) I_j / \sum_k I_k + \lambda / N
        """
        batches, size = shape
        uniform = int(mixing * size + rng.random())
        indices = rng.integers(len(self), size=shape)
        if uniform < size and self._tree.total > 0.0:
            points = rng.random(batches * (size - uniform))
            indices[:, uniform:] = self._tree.find(points).reshape(batches, -1)
        return indices

    def weights(self, indices: NDArray[np.int64], mixing: float) -> NDArray[np.float64]:
        """Weigh samples by 1 / (N q), with q as in :meth:`draw` and the cache as it is now."""
        total = self._tree.total
        if total == 0.0:
            return np.ones(indices.shape)
        probs = (1.0 - mixing) * self._tree[indices] / total + mixing / len(self)
        return inverse_probs(probs, len(self))

    def summary(self, step: int, mixing: float) -> dict[str, float]:
        """Describe the cache in a few figures."""
        ages = step - self.scored_at[self.scored_at >= 0]
        weights = self.weights(np.arange(len(self)), mixing)
        deciles = np.percentile(self.values, DECILES) / (self.mean or 1.0)
        return {
            "coverage": self.coverage,
            "mean-age": float(ages.mean()) if ages.size else 0.0,
            "effective-share": float(1.0 / weights.mean()),
            **dict(zip(IMPORTANCE_PARTS, map(float, deciles), strict=True)),
        }

    def state(self) -> dict[str, NDArray[np.generic] | int]:
        """Return all that is needed to continue, flat."""
        return {
            "importance": self.values.astype(np.float32),
            "scored_at": self.scored_at.copy(),
            "num_averaged": self._num_averaged,
        }

    @classmethod
    def from_state(
        cls, importance: NDArray[np.float32], scored_at: NDArray[np.int32], num_averaged: int
    ) -> "ImportanceCache":
        """Restore a cache from :meth:`state`."""
        for name, array, kind in (("importance", importance, "f"), ("scored_at", scored_at, "i")):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != kind:
                raise ValueError(f"{name} is no vector of kind {kind!r}: start afresh.")
        if len(importance) != len(scored_at):
            raise ValueError("importance and scored_at differ in length: start afresh.")
        check_importance(importance.astype(np.float64))
        cache = cls(len(importance))
        cache._tree = SumTree(importance)
        cache.scored_at = scored_at.astype(np.int32)
        cache._num_scored = int(np.count_nonzero(scored_at >= 0))
        cache._num_averaged = int(num_averaged)
        return cache


MEMORY = 2048.0
"""Scored samples after which the gate's evidence has faded to 1/e."""


Batch = tuple[NDArray[np.int64], NDArray[np.float64]]


class FlatImportance:
    r"""A cache of importance, weighted draws from it, and a gate before them."""

    def __init__(self, num_samples: int, batch_size: int, mixing: float, gate: float) -> None:
        self.batch_size, self.mixing, self.gate = batch_size, mixing, gate
        self.cache, self.moments = ImportanceCache(num_samples), Moments()
        self.stride = Stride(num_samples, batch_size)

    @property
    def is_open(self) -> bool:
        """Whether the next batch is drawn by importance."""
        return self.gate == 0.0 or variance_ratio(self.moments) >= self.gate

    def next(self, rng: np.random.Generator, step: int) -> Batch | None:
        """Draw a batch with its weights."""
        was_open = self.is_open
        if was_open and (batch := self.stride.pop()) is not None:
            return batch
        if was_open:
            self.take_in(step)
        if not self.is_open:
            return None
        indices = self.cache.draw((self.stride.length, self.batch_size), self.mixing, rng)
        self.stride.draw_ahead(indices, self.cache.weights(indices, self.mixing))
        return self.stride.pop()

    def hear(self, indices: NDArray[np.int64], scores: NDArray[np.float64], step: int) -> None:
        """Note the scores of a batch that was drawn; they count at the end of the stride."""
        self.stride.hear(indices, scores)
        if self.stride.is_full:
            self.take_in(step)

    def take_in(self, step: int) -> None:
        """Learn from the batches heard of; what was drawn ahead knows nothing of them."""
        if (heard := self.stride.take_in()) is not None:
            self._learn(*heard, step, by_importance=self.is_open)

    def learn(self, indices: NDArray[np.int64], scores: NDArray[np.float64], step: int) -> None:
        """Take in, at once, the scores of a random set of samples or of all of them."""
        self.take_in(step)
        self._learn(indices, scores, step, by_importance=False)

    def _learn(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        step: int,
        by_importance: bool,
    ) -> None:
        """Cache scores, and look what drawing by the cache as it was gains or would gain."""
        before = self.cache.weights(indices, self.mixing)
        self.cache.set(indices, scores, step)
        # old evidence must not outweigh new because scores were larger then
        relative = scores / (self.cache.mean or 1.0)
        if len(indices) == len(self.cache) == len(np.unique(indices)):
            # all scored by one model: the gain of the new cache is known exactly
            after = self.cache.weights(indices, self.mixing)
            self.moments = observe(Moments(), relative, np.ones(len(indices)), after, MEMORY)
        else:
            drawn = before if by_importance else np.ones(len(indices))
            self.moments = observe(self.moments, relative, drawn, before, MEMORY)
        self.stride.drop()

    def forget(self, indices: NDArray[np.int64], step: int) -> None:
        """Treat some samples as never scored."""
        self.take_in(step)
        self.cache.forget(indices)
        self.stride.drop()

    def summary(self, step: int) -> dict[str, float]:
        """Describe the state in a few figures."""
        return self.cache.summary(step, self.mixing) | {
            "variance-ratio": variance_ratio(self.moments),
            "importance-open": float(self.is_open),
        }

    def state(self) -> dict[str, Any]:
        """Return all that is needed to continue, flat."""
        moments = {"moment_uniform": self.moments.uniform}
        moments["moment_importance"] = self.moments.importance
        return {**self.cache.state(), **self.stride.state(), **moments}

    def restored(self, state: Mapping[str, Any]) -> "FlatImportance":
        """Make one like this from :meth:`state`."""
        twin = FlatImportance(len(self.cache), self.batch_size, self.mixing, self.gate)
        try:
            twin.cache = ImportanceCache.from_state(
                np.asarray(state["importance"]),
                np.asarray(state["scored_at"]),
                int(state["num_averaged"]),
            )
            twin.stride = self.stride.restored(len(self.cache), state)
            twin.moments = Moments(
                float(state["moment_uniform"]), float(state["moment_importance"])
            )
            ahead = np.asarray(state["ahead_indices"], np.int64), np.asarray(state["ahead_weights"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"sampler state is incomplete ({error}): start afresh.") from error
        if len(twin.cache) != len(self.cache):
            raise ValueError("sampler state belongs to other data: start afresh.")
        if not np.allclose(twin.cache.weights(ahead[0], self.mixing), ahead[1]):
            raise ValueError("sampler state holds batches with other weights: start afresh.")
        if not (np.isfinite(twin.moments).all() and min(twin.moments) >= 0.0):
            raise ValueError("sampler state holds impossible figures: start afresh.")
        return twin
