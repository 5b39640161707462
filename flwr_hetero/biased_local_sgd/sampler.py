"""Biased local SGD's sampler: high-loss samples on fast nodes, uniform ones on slow nodes."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.biased_local_sgd.algorithm import (
    check_high_loss_fraction,
    fast_allocation,
    record_losses,
)
from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import invalid
from flwr_hetero.state_dict import StateDict


class TopLossSampler(BatchSampler):
    """Loss-based top-k sampling (Algorithm 1) over a node's own samples, or over a given list.

    In *private mode* the node ranks its own samples: it works through an allocation of
    ``share * N`` samples, the ``high_loss_fraction`` of them with the highest recorded losses
    and the rest at random, then ranks anew. On a slow node an allocation is all samples in
    random order. In *shared-data mode* the server ranks, and :meth:`assign` takes its list.
    Either way :meth:`update` records the loss of every sample as it is processed.

    Parameters
    ----------
    num_samples : int
        Size N of the data set that indices refer to.
    batch_size : int
        Examples per batch; the last of an allocation may be smaller.
    seed : int, keyword-only
        Seed of the sampler's own random generator.
    high_loss_fraction : float
        Lambda in (0, 1]: part of a fast node's allocation that goes by loss.
    share : float
        Size of a fast node's allocation as a part of N, in (0, 1]; 1 is no bias at all. The
        paper's is :func:`~flwr_hetero.biased_local_sgd.algorithm.fast_share`.
    fast : bool
        Whether the node is fast. Slow nodes draw uniformly.

    Attributes
    ----------
    losses : ndarray of float32, shape (num_samples,)
        Latest loss per sample; NaN where none is recorded yet.

    Raises
    ------
    ValueError
        If an argument is out of range.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.2.

    Examples
    --------
    >>> sampler = TopLossSampler(6, batch_size=3, seed=0, high_loss_fraction=1.0, share=0.5)
    >>> sampler.update(np.arange(6), np.array([0.1, 3.0, 0.2, 2.0, 0.3, 1.0]))
    >>> indices, weights = sampler.next_batch()
    >>> sorted(indices.tolist()), weights.tolist()
    ([1, 3, 5], [1.0, 1.0, 1.0])
    """

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
        check_high_loss_fraction(high_loss_fraction)
        self.high_loss_fraction = float(high_loss_fraction)
        self.losses = np.full(self.num_samples, np.nan, np.float32)
        self._unreported = np.zeros(self.num_samples, dtype=bool)
        self._allocation = np.empty(0, np.int64)
        self._position = 0
        self._assigned = False
        self.fast, self.share = bool(fast), float(share)
        self.set_role(fast=fast, share=share)

    def set_role(self, *, fast: bool, share: float) -> None:
        """Follow the server's word on what kind of node this is.

        Parameters
        ----------
        fast : bool
            Whether to sample by loss from now on; a change starts a new allocation.
        share : float
            Size of a fast node's allocations to come, as a part of N in (0, 1].
        """
        if not 0 < share <= 1:
            raise invalid("share", share, "lie in (0, 1]", "it is a part of the local samples")
        if fast != self.fast:
            self._position = len(self._allocation)
        self.fast, self.share = bool(fast), float(share)

    def assign(self, indices: ArrayLike) -> None:
        """Take the list of samples to process next from the server (shared-data mode).

        Parameters
        ----------
        indices : array_like of int, shape (n,)
            Positions in the shared data set; used in this order, and reshuffled if more is
            asked before the next list.

        Raises
        ------
        ValueError
            If the list is empty or an index is out of range.
        """
        index = np.asarray(indices)
        if index.ndim != 1 or not index.size or index.dtype.kind not in "iu":
            described = f"{index.dtype} {index.shape}"
            raise invalid("indices", described, "be a non-empty list of integers", "ask for some")
        self.check_scores(index, np.zeros(index.shape))
        self._allocation, self._position = index.astype(np.int64), 0
        self._assigned = True

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next ``batch_size`` samples of the allocation; all weights are 1."""
        if self._position >= len(self._allocation):
            self._allocation, self._position = self._allocate(), 0
        indices = self._allocation[self._position : self._position + self.batch_size]
        self._position += len(indices)
        return indices, np.ones(len(indices))

    def _allocate(self) -> NDArray[np.int64]:
        if self._assigned:
            return self.rng.permutation(self._allocation)
        if not self.fast:
            return self.rng.permutation(self.num_samples)
        return fast_allocation(
            self.losses, self._allocation_size(), self.high_loss_fraction, self.rng
        )

    def _allocation_size(self) -> int:
        return max(1, round(self.share * self.num_samples))

    def __len__(self) -> int:
        """Batches per epoch of this node: one allocation."""
        size = self._allocation_size() if self.fast else self.num_samples
        return -(-size // self.batch_size)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Record the losses of processed samples (Algorithm 1, line 14).

        Parameters
        ----------
        indices : ndarray of int64, shape (batch,)
            As returned by ``next_batch``.
        scores : ndarray of float64, shape (batch,)
            Loss per sample, finite.
        """
        index, loss = self.check_scores(indices, scores)
        record_losses(self.losses, index, loss)
        self._unreported[index] = True

    def take_losses(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Hand over what :meth:`update` recorded since the last call (shared-data mode).

        Returns
        -------
        indices : ndarray of int64, shape (n,)
            Samples processed, ascending.
        losses : ndarray of float32, shape (n,)
            Their latest losses.
        """
        indices = np.flatnonzero(self._unreported)
        self._unreported[:] = False
        return indices, self.losses[indices]

    def state_dict(self) -> StateDict:
        """Return sizes, generator, role, losses and the place in the allocation."""
        return super().state_dict() | {
            "losses": self.losses.copy(),
            "unreported": self._unreported.copy(),
            "allocation": self._allocation.copy(),
            "position": self._position,
            "assigned": self._assigned,
            "fast": self.fast,
            "share": self.share,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        allocation = np.asarray(state.get("allocation"))
        losses = np.asarray(state.get("losses"))
        unreported = np.asarray(state.get("unreported"))
        bad = allocation.ndim != 1 or allocation.dtype.kind != "i"
        bad = bad or {losses.shape, unreported.shape} != {(self.num_samples,)}
        if bad or (allocation.size and not 0 <= allocation.min() <= allocation.max() < len(losses)):
            raise ValueError("sampler state holds no losses of this data: start afresh.")
        position, share = state.get("position"), state.get("share")
        if not isinstance(position, int) or not 0 <= position <= allocation.size:
            raise ValueError(f"sampler state has position={position!r}: start afresh.")
        if not isinstance(share, float) or not 0 < share <= 1:
            raise ValueError(f"sampler state has share={share!r}: start afresh.")
        if not all(isinstance(state.get(name), bool) for name in ("assigned", "fast")):
            raise ValueError("sampler state does not say what kind of node it is: start afresh.")
        super().load_state_dict(state)
        self.losses = losses.astype(np.float32)
        self._unreported = unreported.astype(bool)
        self._allocation, self._position = allocation.astype(np.int64), position
        self._assigned, self.fast = bool(state["assigned"]), bool(state["fast"])
        self.share = share
