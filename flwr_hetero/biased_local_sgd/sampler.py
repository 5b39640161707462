"""Biased local SGD's sampler: samples of high loss on fast nodes, uniform ones on slow nodes."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import Indices, fast_allocation
from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import check_number
from flwr_hetero.state_dict import StateDict, check_state

SCHEMA = {
    **{"losses": ((-1,), "f"), "unreported": ((-1,), "b"), "allocation": ((-1,), "i")},
    **{"position": int, "assigned": bool, "fast": bool, "share": float},
}
"""What a state holds beside that of all samplers."""


class TopLossSampler(BatchSampler):
    """Sample by loss from a node's own samples, or from a list of the server.

    With data of its own a fast node processes an allocation, then makes the next one; a slow node
    takes all samples in random order. With shared data :meth:`assign` takes the server's list.
    Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems", section
    4.2, Algorithm 1. An argument that is out of range is a ValueError.

    Parameters
    ----------
    num_samples, batch_size, seed : int
        As for all samplers; the last batch of an allocation may be smaller.
    high_loss_fraction : float
        Lambda in (0, 1]: part of a fast node's allocation that goes by loss; the rest is random.
    share : float
        Size of a fast node's allocation as a part of N, in (0, 1]; 1 is no bias at all.
    fast : bool
        Whether the node is fast. Slow nodes draw uniformly.

    Examples
    --------
    >>> sampler = TopLossSampler(6, batch_size=3, seed=0, high_loss_fraction=1.0, share=0.5)
    >>> sampler.update(np.arange(6), np.array([0.1, 3.0, 0.2, 2.0, 0.3, 1.0]))
    >>> indices, weights = sampler.next_batch()
    >>> sorted(indices.tolist()), weights.tolist()
    ([1, 3, 5], [1.0, 1.0, 1.0])
    """

    learns = True

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        high_loss_fraction: float = 0.5,
        share: float = 0.7,
        fast: bool = True,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.high_loss_fraction = check_number("high_loss_fraction", high_loss_fraction, "(0, 1]")
        self.share = check_number("share", share, "(0, 1]")
        self.fast = bool(fast)
        # By sample: its latest loss, NaN if unknown.
        self.losses = np.full(self.num_samples, np.nan, np.float32)
        self.unreported = np.zeros(self.num_samples, dtype=bool)
        self.allocation = np.empty(0, np.int64)
        self.position = 0
        self.assigned = False

    def read_instruction(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the class that the server assigns; a node without one samples uniformly."""
        role = next((record for record in records.values() if keys.FAST in record), {})
        self.high_loss_fraction = role.get(keys.HIGH_LOSS_FRACTION, self.high_loss_fraction)
        self.share = role.get(keys.FAST_SHARE, self.share)
        if (is_fast := bool(role.get(keys.FAST))) != self.fast:
            # It needs a new allocation, for which the new share counts.
            self.fast = is_fast
            self.position = len(self.allocation)

    def assign(self, indices: ArrayLike) -> None:
        """Process these positions of the shared data set next; in this order, then reshuffled."""
        self.allocation = np.array(indices, np.int64)
        self.position = 0
        self.assigned = True

    def next_batch(self) -> tuple[Indices, NDArray[np.float64]]:
        """Take the next ``batch_size`` samples of the allocation; all weights are 1."""
        if self.position >= len(self.allocation):
            self.allocation = self._allocate()
            self.position = 0
        indices = self.allocation[self.position : self.position + self.batch_size]
        self.position += len(indices)
        return indices, np.ones(len(indices))

    def _allocate(self) -> Indices:
        if self.assigned:
            # The server's list is used once more.
            return self.rng.permutation(self.allocation)
        if self.fast:
            # Alg. 1, l. 3 to 5, of the node's own samples
            return fast_allocation(self.losses, self._size(), self.high_loss_fraction, self.rng)
        # l. 6
        return self.rng.permutation(self.num_samples)

    def _size(self) -> int:
        return max(1, round(self.share * self.num_samples)) if self.fast else self.num_samples

    def __len__(self) -> int:
        """Batches per epoch of this node: one allocation."""
        return -(-self._size() // self.batch_size)

    def update(self, indices: Indices, scores: NDArray[np.float64]) -> None:
        """Record the losses of processed samples."""
        index, loss = self.check_scores(indices, scores)
        # l. 14
        self.losses[index] = loss
        self.unreported[index] = True

    def take_losses(self) -> tuple[Indices, NDArray[np.float32]]:
        """Return the samples recorded since the last call, ascending, and their latest losses."""
        indices = np.flatnonzero(self.unreported)
        self.unreported[:] = False
        return indices, self.losses[indices]

    def state_dict(self) -> StateDict:
        """Return sizes, generator, role, losses and the position in the allocation."""
        return super().state_dict() | {name: copy(getattr(self, name)) for name in SCHEMA}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; see the parent for errors."""
        check_state(state, SCHEMA, "TopLossSampler")
        super().load_state_dict(state)
        for name in SCHEMA:
            setattr(self, name, copy(state[name]))
