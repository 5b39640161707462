"""Several samplers over the same data, a batch each in turn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.entries import entries_below
from flwr_hetero.core.errors import invalid
from flwr_hetero.sampler.batches import BatchSampler, StateDict


class InTurn(BatchSampler):
    """Let samplers draw in turn: an order for one batch, importance for the next.

    What one sampler alone could not do: an :class:`~flwr_hetero.sampler.OrderedSampler` visits
    every example once a pass, a :class:`~flwr_hetero.sampler.MercurySampler` some more often
    than others. Taken in turn each keeps its own rule, and each batch is as unbiased as the
    sampler that drew it.

    Parameters
    ----------
    samplers : sequence of BatchSampler
        At least one, all of the same number of samples.

    Attributes
    ----------
    current : BatchSampler
        The one that drew the batch in hand: the last of :meth:`next_batch` or, where a
        DataLoader draws ahead, of :meth:`take`. :meth:`update` goes to it.

    Raises
    ------
    ValueError
        If there are none or their data sets differ in size.

    Examples
    --------
    >>> from flwr_hetero.sampler import MercurySampler, OrderedSampler
    >>> both = InTurn([OrderedSampler(10, 5), MercurySampler(10, 5)])
    >>> [type(both.current).__name__ for _ in both]
    ['OrderedSampler', 'MercurySampler']
    """

    def __init__(self, samplers: Sequence[BatchSampler]) -> None:
        sizes = {sampler.num_samples for sampler in samplers}
        if len(sizes) != 1:
            rule = f"be at least one, of equally large data sets, not {sorted(sizes)}"
            raise invalid("samplers", len(samplers), rule, "make them for the same data")
        first = samplers[0]
        super().__init__(first.num_samples, first.batch_size)
        self.samplers = list(samplers)
        self.current = first
        self._turn = 0

    def __len__(self) -> int:
        """Batches per epoch: as many as the first sampler has alone."""
        return len(self.samplers[0])

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Let the next sampler draw."""
        self.current = self.samplers[self._turn]
        self._turn = (self._turn + 1) % len(self.samplers)
        return self.current.next_batch()

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Collect the oldest batch yielded by iteration; see the parent."""
        batches_ago = len(self._drawn)
        batch = super().take()
        self.current = self.samplers[(self._turn - batches_ago) % len(self.samplers)]
        return batch

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Tell the sampler that drew the batch."""
        self.current.update(indices, scores)

    def state_dict(self) -> StateDict:
        """Return whose turn it is, and every sampler's own state."""
        own: StateDict = {"turn": self._turn, "num_samplers": len(self.samplers)}
        for number, sampler in enumerate(self.samplers):
            own |= {f"{number}.{key}": value for key, value in sampler.state_dict().items()}
        return own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        turn = state.get("turn")
        wanted = len(self.samplers)
        if state.get("num_samplers") != wanted or not isinstance(turn, int):
            raise ValueError(f"sampler state is not of {wanted} samplers: start afresh.")
        if not 0 <= turn < wanted:
            raise ValueError(f"sampler state has turn={turn}: start afresh.")
        before = [sampler.state_dict() for sampler in self.samplers]
        try:
            for number, sampler in enumerate(self.samplers):
                sampler.load_state_dict(entries_below(f"{number}.", state))
        except ValueError:
            for sampler, own in zip(self.samplers, before, strict=True):
                sampler.load_state_dict(own)
            raise
        self._turn = turn
