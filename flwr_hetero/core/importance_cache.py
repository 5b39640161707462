"""The cache of each sample's latest importance, and unbiased draws from it (Mercury, flat)."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.importance import check_importance, inverse_probs
from flwr_hetero.core.sum_tree import SumTree

DECILES = (10, 50, 90)
IMPORTANCE_PARTS = tuple(f"importance-with-mean-1.{share} % are below" for share in DECILES)
"""Names of the deciles in a summary; a plot's legend shows what follows the point."""


class ImportanceCache:
    r"""Latest importance per sample; samples never scored count as average.

    Drawing and updating cost as much as the samples drawn and updated, whatever N.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.

    Attributes
    ----------
    scored_at : ndarray of int32, shape (num_samples,)
        Step at which each sample was last scored; -1 for never.

    Notes
    -----
    Importance is kept in single precision, so that a saved cache is the cache. The samples
    never scored are set to the average of the others each time these have doubled in number,
    which costs N operations at most log2(N) times in all.

    Examples
    --------
    >>> cache = ImportanceCache(4)
    >>> cache.set(np.arange(3), np.array([6.0, 2.0, 1.0]), step=1)
    >>> cache.values
    array([6., 2., 1., 3.])
    >>> cache.weights(np.array([0, 2, 3]), mixing=0.5)
    array([0.66666667, 1.5       , 1.        ])
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
        """Replace the importance of some samples.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Positions in ``range(num_samples)``; where one stands twice, the last score stays.
        scores : ndarray of float64, shape (b,)
            Finite and not negative.
        step : int
            Present step, for the ages.

        Raises
        ------
        ValueError
            If a score cannot serve as importance; the cache is then unchanged.
        """
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
        """Treat some samples as never scored, because other samples took their place.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Positions in ``range(num_samples)``.
        """
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

        Parameters
        ----------
        shape : tuple of int
            Batches, and draws in each.
        mixing : float
            Share :math:`\lambda` of uniform draws; its part of a batch is fixed up to rounding,
            which varies less than a coin per draw and has the same mean.
        rng : np.random.Generator
            Source of chance.

        Returns
        -------
        ndarray of int64, shape ``shape``
            In each batch the uniform draws first.
        """
        batches, size = shape
        uniform = int(mixing * size + rng.random())
        indices = rng.integers(len(self), size=shape)
        if uniform < size and self._tree.total > 0.0:
            points = rng.random(batches * (size - uniform))
            indices[:, uniform:] = self._tree.find(points).reshape(batches, -1)
        return indices

    def weights(self, indices: NDArray[np.int64], mixing: float) -> NDArray[np.float64]:
        """Weigh samples by 1 / (N q), with q as in :meth:`draw` and the cache as it is now.

        Parameters
        ----------
        indices : ndarray of int64
            Drawn samples.
        mixing : float
            As they were drawn.

        Returns
        -------
        ndarray of float64, shape of ``indices``
            At most ``1 / mixing``; all 1 if no sample has any importance.
        """
        total = self._tree.total
        if total == 0.0:
            return np.ones(indices.shape)
        probs = (1.0 - mixing) * self._tree[indices] / total + mixing / len(self)
        return inverse_probs(probs, len(self))

    def summary(self, step: int, mixing: float) -> dict[str, float]:
        """Describe the cache in a few figures.

        Parameters
        ----------
        step : int
            Present step, for the ages.
        mixing : float
            As it is drawn from.

        Returns
        -------
        dict of str to float
            ``coverage`` (share ever scored), ``mean-age`` (steps since a sample was scored,
            over those scored), ``effective-share`` (effective sample size of a large batch, as
            a part of it) and, in the group ``importance-with-mean-1``, the importance below which
            are 10, 50 and 90 % of the samples, relative to the mean.
        """
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
        """Restore a cache from :meth:`state`.

        Parameters
        ----------
        importance, scored_at, num_averaged
            The entries of :meth:`state`.

        Returns
        -------
        ImportanceCache
            Equal to the one saved.

        Raises
        ------
        ValueError
            If the arrays are not a cache: other shapes or types, negative or not finite.
        """
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
