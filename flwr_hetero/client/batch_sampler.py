"""What every sampler of this package shares: the batch protocol, the queue and the state."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid
from flwr_hetero.state_dict import StateDict, entries_below, rng_from_str, rng_to_str


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
        Called after each epoch of an iteration; see :func:`flwr_hetero.client.keep`.

    Raises
    ------
    ValueError
        If a size is not a positive integer.

    Examples
    --------
    >>> from flwr_hetero.client.batch_sampler import UniformSampler
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
    >>> from flwr_hetero.sampler import MercurySampler
    >>> from flwr_hetero.sampler import OrderedSampler
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
