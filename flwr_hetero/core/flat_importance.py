"""Mercury's flat estimator: draw over all samples, but only while it is worth it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.gate import Moments, observe, variance_ratio
from flwr_hetero.core.importance_cache import ImportanceCache
from flwr_hetero.core.stride import Stride

MEMORY = 2048.0
"""Scored samples after which the gate's evidence has faded to 1/e."""

Batch = tuple[NDArray[np.int64], NDArray[np.float64]]


class FlatImportance:
    r"""A cache of importance, weighted draws from it, and a gate before them.

    Parameters
    ----------
    num_samples, batch_size : int
        Size N of the local data set, and draws per batch.
    mixing : float
        Share of uniform draws in (0, 1].
    gate : float
        Smallest ratio of second moments, uniform over importance, for which importance is used;
        0 always uses it.

    Attributes
    ----------
    cache : ImportanceCache
        Latest importance of every sample.
    moments : Moments
        Evidence for the gate.
    stride : Stride
        Batches drawn ahead and scores not yet taken in.

    Examples
    --------
    >>> flat = FlatImportance(4, 2, mixing=0.5, gate=1.2)
    >>> rng = np.random.default_rng(0)
    >>> flat.next(rng, step=1) is None  # nothing known: the caller draws uniformly
    True
    >>> flat.learn(np.arange(4), np.array([9.0, 0.0, 0.0, 0.0]), step=1)
    >>> indices, weights = flat.next(rng, step=2)
    >>> round(flat.summary(step=2)["variance-ratio"], 2)
    2.5
    """

    def __init__(self, num_samples: int, batch_size: int, mixing: float, gate: float) -> None:
        self.batch_size, self.mixing, self.gate = batch_size, mixing, gate
        self.cache, self.moments = ImportanceCache(num_samples), Moments()
        self.stride = Stride(num_samples, batch_size)

    @property
    def is_open(self) -> bool:
        """Whether the next batch is drawn by importance."""
        return self.gate == 0.0 or variance_ratio(self.moments) >= self.gate

    def next(self, rng: np.random.Generator, step: int) -> Batch | None:
        """Draw a batch with its weights.

        Parameters
        ----------
        rng : np.random.Generator
            Source of chance.
        step : int
            Present step, for the ages.

        Returns
        -------
        tuple of ndarray, or None
            Indices and weights; None if the gate is closed.
        """
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
        """Note the scores of a batch that was drawn; they count at the end of the stride.

        Parameters
        ----------
        indices, scores : ndarray, shape (batch,)
            Checked.
        step : int
            Present step, for the ages.
        """
        self.stride.hear(indices, scores)
        if self.stride.is_full:
            self.take_in(step)

    def take_in(self, step: int) -> None:
        """Learn from the batches heard of; what was drawn ahead knows nothing of them.

        Parameters
        ----------
        step : int
            Present step, for the ages.
        """
        if (heard := self.stride.take_in()) is not None:
            self._learn(*heard, step, by_importance=self.is_open)

    def learn(self, indices: NDArray[np.int64], scores: NDArray[np.float64], step: int) -> None:
        """Take in, at once, the scores of a random set of samples or of all of them.

        Parameters
        ----------
        indices, scores : ndarray, shape (b,)
            Checked.
        step : int
            Present step, for the ages.
        """
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
        """Treat some samples as never scored.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Positions in the local data set.
        step : int
            Present step, for the ages.
        """
        self.take_in(step)
        self.cache.forget(indices)
        self.stride.drop()

    def summary(self, step: int) -> dict[str, float]:
        """Describe the state in a few figures.

        Parameters
        ----------
        step : int
            Present step, for the ages.

        Returns
        -------
        dict of str to float
            ``variance-ratio`` (uniform over importance draws) and ``importance-open`` (0 or 1),
            beside those of :meth:`~flwr_hetero.core.importance_cache.ImportanceCache.summary`.
        """
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
        """Make one like this from :meth:`state`.

        Parameters
        ----------
        state : mapping
            From :meth:`state`, or more.

        Returns
        -------
        FlatImportance
            Equal to the one saved.

        Raises
        ------
        ValueError
            If the state is incomplete, damaged or of other data.
        """
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
