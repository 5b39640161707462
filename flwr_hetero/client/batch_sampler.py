"""Batch samplers: the protocol that all of them follow, uniform sampling, and several in turn."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import check_count, invalid
from flwr_hetero.state_dict import StateDict, check_state, entries_below, rng_from_str, rng_to_str

Batch: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Indices in the local data and, for each, the factor of its loss."""


class BatchSampler(ABC):
    """Draw mini-batches of indices with a weight for each example's loss.

    Iterating yields one epoch of index lists, so an instance is a ``batch_sampler`` for
    ``torch.utils.data.DataLoader``. Indices and weights of each batch are kept in order until
    :meth:`take` collects them, also when a DataLoader with workers draws ahead.

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
    learns_from : {"loss", "importance", "priority"}
        What :meth:`update` expects as scores.
    on_pass_end : callable or None
        Called after each epoch of an iteration; see :func:`flwr_hetero.mod.keep`.

    Raises
    ------
    ValueError
        If a size is not a positive integer.

    Examples
    --------
    >>> from flwr_hetero.sampler import UniformSampler
    >>> sampler = UniformSampler(num_samples=10, batch_size=4, seed=0)
    >>> [len(batch) for batch in sampler]
    [4, 4, 2]
    >>> indices, weights = sampler.take()
    >>> len(indices), weights.tolist()
    (4, [1.0, 1.0, 1.0, 1.0])
    """

    learns_from = "loss"

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0) -> None:
        self.num_samples = check_count("num_samples", num_samples, 1)
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.rng = np.random.default_rng(seed)
        self.on_pass_end: Callable[[], None] | None = None
        self._drawn: deque[Batch] = deque()

    @abstractmethod
    def next_batch(self) -> Batch:
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
        """Learn from the scores of processed examples, one finite number per index."""

    def watch(self, indices: NDArray[np.int64], losses: Any) -> None:  # noqa: B027
        """Learn from the backward pass that these losses are about to go through, if at all."""

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one epoch of batches as lists of indices, keeping each for ``take``."""
        self._drawn.clear()
        for _ in range(len(self)):
            self._drawn.append(self.next_batch())
            yield self._drawn[-1][0].tolist()
        if self.on_pass_end is not None:
            self.on_pass_end()

    def take(self) -> Batch:
        """Collect indices and weights of the oldest batch that iteration yielded."""
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

        Raises
        ------
        ValueError
            If the state is damaged, or of other data; the sampler is then unchanged.
        """
        owner = type(self).__name__
        check_state(state, {"num_samples": int, "batch_size": int, "rng": str}, owner)
        for name in ("num_samples", "batch_size"):
            if state[name] != (own := getattr(self, name)):
                raise ValueError(f"state of {owner} must hold {name}={own}, got {state[name]!r}.")
        self.rng = rng_from_str(str(state["rng"]))

    def check_scores(
        self, indices: NDArray[np.int64], scores: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the arguments of ``update`` as int64 and float64; refuse what does not fit."""
        index = np.asarray(indices, dtype=np.int64)
        score = np.asarray(scores, dtype=np.float64)
        if index.ndim != 1 or index.shape != score.shape:
            raise invalid("scores", score.shape, f"have the shape of indices {index.shape}")
        if index.size and (index.min() < 0 or index.max() >= self.num_samples):
            span = (int(index.min()), int(index.max()))
            raise invalid("indices", span, f"lie in range({self.num_samples})")
        bad = score[~np.isfinite(score)]
        if bad.size:
            hint = "the model has diverged, lower the learning rate"
            raise invalid("scores", bad[:3].tolist(), "be finite", hint)
        return index, score


class UniformSampler(BatchSampler):
    """Random reshuffling: each epoch is a new permutation, each weight is 1.

    Parameters
    ----------
    num_samples, batch_size, seed : int
        As of :class:`BatchSampler`; the last batch of an epoch may be smaller.

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

    def next_batch(self) -> Batch:
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
        owner = type(self).__name__
        check_state(state, {"order": ((self.num_samples,), "i"), "position": int}, owner)
        order, position = np.asarray(state["order"]), int(state["position"])
        check_permutation(order, owner)
        if not 0 <= position <= self.num_samples:
            raise ValueError(f"state of {owner} must hold a position in the data, got {position}.")
        super().load_state_dict(state)
        self.order, self.position = order.astype(np.int64), position


def check_permutation(order: NDArray[np.generic], owner: str) -> None:
    """Refuse an order in a saved state that is no permutation."""
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ValueError(f"state of {owner} must hold order as a permutation.")


def coverage_and_age(scored_at: NDArray[np.signedinteger], now: int) -> dict[str, float]:
    """Summarise when each sample was scored, -1 where never: share scored and mean age."""
    ages = now - scored_at[scored_at >= 0]
    return {
        "coverage": len(ages) / len(scored_at),
        "mean-age": float(ages.mean()) if ages.size else 0.0,
    }


class InTurn(BatchSampler):
    """Let samplers draw in turn: an order for one batch, importance for the next.

    Each keeps its own rule, and each batch is as unbiased as the sampler that drew it.

    Parameters
    ----------
    samplers : sequence of BatchSampler
        At least one, all of the same number of samples.

    Attributes
    ----------
    current : BatchSampler
        The one that drew the batch in use: the last of :meth:`next_batch` or, where a
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
        sizes = sorted({sampler.num_samples for sampler in samplers})
        if len(sizes) != 1:
            raise invalid("samplers", sizes, "be at least one, of equally large data sets")
        first = samplers[0]
        super().__init__(first.num_samples, first.batch_size)
        self.samplers = list(samplers)
        self.current = first
        self._turn = 0

    def __len__(self) -> int:
        """Batches per epoch: as many as the first sampler has alone."""
        return len(self.samplers[0])

    def next_batch(self) -> Batch:
        """Let the next sampler draw."""
        self.current = self.samplers[self._turn]
        self._turn = (self._turn + 1) % len(self.samplers)
        return self.current.next_batch()

    def take(self) -> Batch:
        """Collect the oldest batch that iteration yielded."""
        batches_ago = len(self._drawn)
        batch = super().take()
        self.current = self.samplers[(self._turn - batches_ago) % len(self.samplers)]
        return batch

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Pass the scores on to the sampler that drew the batch."""
        self.current.update(indices, scores)

    def watch(self, indices: NDArray[np.int64], losses: Any) -> None:
        """Pass the losses on to the sampler that drew the batch."""
        self.current.watch(indices, losses)

    def state_dict(self) -> StateDict:
        """Return which sampler draws next, and every sampler's own state."""
        own: StateDict = {"turn": self._turn, "num_samplers": len(self.samplers)}
        for number, sampler in enumerate(self.samplers):
            own |= {f"{number}.{key}": value for key, value in sampler.state_dict().items()}
        return own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        check_state(state, {"turn": int, "num_samplers": int}, "InTurn")
        turn, wanted = int(state["turn"]), len(self.samplers)
        if state["num_samplers"] != wanted or not 0 <= turn < wanted:
            raise ValueError(f"state of InTurn must hold {wanted} samplers and a turn among them.")
        before = [sampler.state_dict() for sampler in self.samplers]
        try:
            for number, sampler in enumerate(self.samplers):
                sampler.load_state_dict(entries_below(f"{number}.", state))
        except ValueError:
            for sampler, own in zip(self.samplers, before, strict=True):
                sampler.load_state_dict(own)
            raise
        self._turn = turn
