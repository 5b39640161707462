"""Plain random reshuffling: the baseline of every sampler."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.sampler.batches import BatchSampler, StateDict


class UniformSampler(BatchSampler):
    """Random reshuffling: each epoch is a fresh permutation, each weight is 1.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch; the last of an epoch may be smaller.
    seed : int, keyword-only
        Seed of the sampler's own random generator.

    Examples
    --------
    >>> sampler = UniformSampler(6, 3, seed=1)
    >>> first, _ = sampler.next_batch()
    >>> second, _ = sampler.next_batch()
    >>> sorted([*first.tolist(), *second.tolist()])
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.order = self.rng.permutation(self.num_samples)
        self.position = 0

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next ``batch_size`` entries of the epoch's permutation."""
        if self.position >= self.num_samples:
            self.order, self.position = self.rng.permutation(self.num_samples), 0
        indices = self.order[self.position : self.position + self.batch_size]
        self.position += len(indices)
        return indices, np.ones(len(indices))

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: uniform sampling has nothing to learn."""

    def state_dict(self) -> StateDict:
        """Return sizes, generator, the epoch's order and the position in it."""
        return super().state_dict() | {"order": self.order.copy(), "position": self.position}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        order, position = np.asarray(state.get("order")), state.get("position")
        if not np.array_equal(np.sort(order, axis=None), np.arange(self.num_samples)):
            raise ValueError("sampler state holds no permutation of the data: start afresh.")
        if not isinstance(position, int) or not 0 <= position <= self.num_samples:
            raise ValueError("sampler state holds no position in the data: start afresh.")
        super().load_state_dict(state)
        self.order, self.position = order.astype(np.int64), position
