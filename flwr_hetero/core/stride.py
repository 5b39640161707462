"""Work for several batches at once: what costs a call per batch is paid once per stride."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 32
"""Batches in a stride, at most: most of the gain, little delay."""
SHARE = 1 / 8
"""Part of an epoch that a stride may last: importance changes over epochs."""


class Stride:
    """Batches drawn ahead, and scores heard but not yet taken in.

    Parameters
    ----------
    num_samples, batch_size : int
        Of the sampler; they decide how long a stride is. It is one batch on small data.

    Attributes
    ----------
    length : int
        Batches drawn, and heard of, at a time.

    Examples
    --------
    >>> stride = Stride(num_samples=60_000, batch_size=32)
    >>> stride.length, Stride(num_samples=1_000, batch_size=32).length
    (32, 3)
    >>> stride.draw_ahead(np.array([[1, 2], [3, 4]]), np.ones((2, 2)))
    >>> stride.pop()
    (array([1, 2]), array([1., 1.]))
    >>> stride.hear(np.array([1, 2]), np.array([0.5, 0.1]))
    >>> stride.take_in()
    (array([1, 2]), array([0.5, 0.1]))
    """

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.length = int(np.clip(SHARE * num_samples / batch_size, 1, LONGEST))
        self._batch_size = batch_size
        self._ahead: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._heard: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._num_heard = 0

    def draw_ahead(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Keep batches for later.

        Parameters
        ----------
        indices, weights : ndarray, shape (batches, batch_size)
            The first batch comes first.
        """
        self._ahead = list(zip(indices, weights, strict=True))[::-1]

    def pop(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Give the next batch drawn ahead; None if there is none."""
        return self._ahead.pop() if self._ahead else None

    def drop(self) -> None:
        """Forget what was drawn ahead."""
        self._ahead = []

    def hear(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Keep the scores of a batch until the stride is full.

        Parameters
        ----------
        indices, scores : ndarray, shape (batch,)
            Checked already.
        """
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
        """Make a stride like this one from :meth:`state`.

        Parameters
        ----------
        num_samples : int
            Size of the data that indices refer to.
        state : dict
            From :meth:`state`.

        Returns
        -------
        Stride
            Equal to the one saved.

        Raises
        ------
        ValueError
            If the state is no such state.
        """
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
