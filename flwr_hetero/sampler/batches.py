"""What every sampler of this package shares: the batch protocol, the queue and the state."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.rng import rng_from_str, rng_to_str

StateDict: TypeAlias = dict[str, NDArray[np.generic] | int | float | str | bool]
"""Flat, so that it fits into Flower records and npz files without pickle."""


class BatchSampler(ABC):
    """Draw mini-batches of indices with a weight for each example's loss.

    A subclass says which indices come next (``next_batch``) and learns from the scores of
    the examples just processed (``update``). Iterating yields one epoch of index lists, so
    an instance is a ``batch_sampler`` for ``torch.utils.data.DataLoader``; the indices and
    weights of each batch are kept in order until ``take`` collects them, also when a
    DataLoader with workers draws ahead.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch.
    seed : int, keyword-only
        Seed of the sampler's own random generator.

    Attributes
    ----------
    on_pass_end : callable or None
        Called after each epoch of an iteration; see :func:`flwr_hetero.mod.keep`.

    Raises
    ------
    ValueError
        If a size is not a positive integer.

    Examples
    --------
    >>> from flwr_hetero.sampler.uniform import UniformSampler
    >>> sampler = UniformSampler(num_samples=10, batch_size=4, seed=0)
    >>> [len(batch) for batch in sampler]
    [4, 4, 2]
    >>> indices, weights = sampler.take()
    >>> len(indices), weights.tolist()
    (4, [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0) -> None:
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise invalid(name, value, "be a positive integer", "check the local data set")
        self.num_samples = int(num_samples)
        self.batch_size = int(batch_size)
        self.rng = np.random.default_rng(seed)
        self.on_pass_end: Callable[[], None] | None = None
        self._drawn: deque[tuple[NDArray[np.int64], NDArray[np.float64]]] = deque()

    @abstractmethod
    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw the next mini-batch.

        Returns
        -------
        indices : ndarray of int64, shape (batch,)
            Positions in the local data set, in ``range(num_samples)``.
        weights : ndarray of float64, shape (batch,)
            Factor for each example's loss; the step is the mean of ``weights * losses``.
        """

    @abstractmethod
    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Learn from the scores (losses, priorities, ...) of processed examples.

        Parameters
        ----------
        indices : ndarray of int64, shape (batch,)
            As returned by ``next_batch``.
        scores : ndarray of float64, shape (batch,)
            One finite figure per index.
        """

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one epoch of batches as lists of indices, keeping each for ``take``."""
        self._drawn.clear()
        for _ in range(len(self)):
            indices, weights = self.next_batch()
            self._drawn.append((indices, weights))
            yield indices.tolist()
        if self.on_pass_end is not None:
            self.on_pass_end()

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Collect indices and weights of the oldest batch yielded by iteration.

        Returns
        -------
        tuple of ndarray
            As from ``next_batch``.

        Raises
        ------
        IndexError
            If every yielded batch was taken already.
        """
        if not self._drawn:
            raise IndexError("no batch to take: call take() once per batch that iteration gave.")
        return self._drawn.popleft()

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue, as flat arrays and scalars."""
        return {
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "rng": rng_to_str(self.rng),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken.

        Parameters
        ----------
        state : dict
            From ``state_dict`` of a sampler of the same class and sizes.

        Raises
        ------
        ValueError
            If a key is missing or the state belongs to a data set of another size. The
            sampler is then unchanged.
        """
        for name in ("num_samples", "batch_size"):
            if name not in state or state[name] != getattr(self, name):
                raise ValueError(
                    f"sampler state has {name}={state.get(name)!r}, this sampler has "
                    f"{getattr(self, name)}: it was saved for other data; start afresh."
                )
        self.rng = rng_from_str(str(state.get("rng")))

    def check_scores(
        self, indices: NDArray[np.int64], scores: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Check and convert the arguments of ``update``.

        Parameters
        ----------
        indices, scores : array_like, shape (batch,)
            As passed to ``update``.

        Returns
        -------
        tuple of ndarray
            As int64 and float64.

        Raises
        ------
        ValueError
            If shapes differ, an index is out of range or a score is not finite.
        """
        index = np.asarray(indices, dtype=np.int64)
        score = np.asarray(scores, dtype=np.float64)
        if index.ndim != 1 or index.shape != score.shape:
            raise invalid(
                "scores", score.shape, f"have the shape of indices {index.shape}", "pass one each"
            )
        if index.size and (index.min() < 0 or index.max() >= self.num_samples):
            raise invalid(
                "indices",
                (int(index.min()), int(index.max())),
                f"lie in range({self.num_samples})",
                "pass what next_batch returned",
            )
        if not np.isfinite(score).all():
            raise invalid(
                "scores",
                score[~np.isfinite(score)][:3].tolist(),
                "be finite",
                "the model has diverged: lower the learning rate",
            )
        return index, score
