"""Batch samplers: the protocol of all of them, and uniform sampling."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from flwr_hetero.client.session import current_session
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Batch: TypeAlias = tuple[Indices, Floats]
"""Indices in the local data and, for each, the factor of its loss."""


class BatchSampler(ABC, Sampler[list[int]]):
    """Draw mini-batches of indices with a weight for each example's loss.

    Iterating yields one epoch of index lists, so an instance is a ``batch_sampler`` for
    ``torch.utils.data.DataLoader``. Indices and weights of each batch are kept in order until
    :meth:`take` collects them, also when a DataLoader with workers draws ahead.

    Parameters
    ----------
    num_samples, batch_size : int
        Size N of the local data set, and examples per batch; else ValueError.
    seed : int, keyword-only
        Seed of the sampler's own random generator.

    Examples
    --------
    >>> sampler = UniformSampler(num_samples=10, batch_size=4, seed=0)
    >>> [len(batch) for batch in sampler]
    [4, 4, 2]
    >>> indices, weights = sampler.take()
    >>> len(indices), weights.tolist()
    (4, [1.0, 1.0, 1.0, 1.0])
    """

    learns_from = "loss"
    """What :meth:`update` expects as scores: ``loss``, ``importance`` or ``priority``."""
    # Attributes that must be the same in a state.
    settings: ClassVar[tuple[str, ...]] = ("num_samples", "batch_size")
    # A sampler that learns raises an error if a training loop neither takes nor updates batches.
    learns = False
    # Whether watch() looks at gradients of a model's parameters.
    needs_model = False
    # End of that error: what to add to the training loop.
    hint: ClassVar[str] = "take as loss: criterion = WeightedLoss(loader.batch_sampler)"

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0) -> None:
        self.num_samples = check_count("num_samples", num_samples, 1)
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.rng = np.random.default_rng(check_count("seed", seed))
        # Whether the next pass only prolongs the one before, whose batches are still in use.
        self.continues = False
        self._drawn: deque[Batch] = deque()
        self._pass = 0
        self._was_trained = False

    @abstractmethod
    def next_batch(self) -> Batch:
        """Draw a batch, (batch,) indices and weights: the step is the mean of weights * losses."""

    def update(self, indices: Indices, scores: Floats) -> None:
        """Learn from the scores of processed examples, one finite number per index, if at all."""

    def watch(self, indices: Indices, losses: Any) -> None:
        """Learn from the backward pass that these losses are about to go through, if at all."""

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one epoch of batches as lists of indices, keeping each for ``take``."""
        session = current_session()
        if session is not None and self not in session.iterated:
            session.iterated.append(self)
        self.begin_pass()
        number = self._pass
        try:
            for _ in range(self.batches_left()):
                self._drawn.append(self.next_batch())
                yield self._drawn[-1][0].tolist()
        except GeneratorExit:
            # The loop was left early. Garbage collection may close it after the next has begun.
            if number == self._pass:
                self.give_back()
            raise

    def begin_pass(self) -> None:
        """Prepare for an iteration: drop the batches of an earlier one that were not taken."""
        if not self.continues:
            self._drawn.clear()
        self.continues = False
        self._pass += 1

    def batches_left(self) -> int:
        """Return the number of batches that an iteration gives: an epoch."""
        return len(self)

    def give_back(self) -> None:
        """Put back batches that were drawn ahead and will not be trained, if that matters."""

    def settle(self) -> None:
        """End an iteration that is still open, as the loop over it has ended."""
        self.give_back()
        self._pass += 1

    def take(self) -> Batch:
        """Collect indices and weights of the oldest batch that iteration yielded."""
        if not self._drawn:
            raise IndexError(
                "no batch to take: once per batch that iteration gave, in training only."
            )
        self.mark_trained()
        return self._drawn.popleft()

    def mark_trained(self) -> None:
        """Note that the training loop takes or updates batches."""
        self._was_trained = True

    def why_not_trained(self) -> str:
        """Return what the training loop lacks so that the sampler learns; empty if nothing."""
        if self._was_trained or not self.learns:
            return ""
        name = type(self).__name__
        return f"{name} learns nothing: no batch was taken or updated; {self.hint}"

    def read_instruction(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Follow the records of a training instruction, if any is for this sampler."""

    def reply_records(self) -> dict[str, Mapping[str, Any]]:
        """Return the records for the reply to that instruction."""
        return {}

    def train_model(self, model: Any) -> None:
        """Set the model that is trained on the batches."""

    def fed_by(self, model: Any) -> "BatchSampler":
        """Return the sampler to draw with where this model is trained on the batches."""
        return self

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue, as flat arrays and scalars."""
        settings = {name: getattr(self, name) for name in self.settings}
        return {**settings, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; ValueError, unchanged, if it does not fit."""
        owner = type(self).__name__
        settings = {name: type(getattr(self, name)) for name in self.settings}
        check_state(state, {**settings, "rng": str}, owner)
        for name in self.settings:
            wanted = getattr(self, name)
            if state[name] != wanted:
                raise ValueError(
                    f"state of {owner} must hold {name}={wanted}, got {state[name]!r}."
                )
        self.rng = rng_from_str(str(state["rng"]))

    def check_scores(self, indices: Indices, scores: Floats) -> tuple[Indices, Floats]:
        """Return the arguments of ``update`` as int64 and float64; refuse what does not fit."""
        index = np.asarray(indices, dtype=np.int64)
        score = np.asarray(scores, dtype=np.float64)
        if index.ndim != 1 or index.shape != score.shape:
            raise invalid("scores", score.shape, f"have the shape of indices {index.shape}")
        if index.size and (index.min() < 0 or index.max() >= self.num_samples):
            span = (int(index.min()), int(index.max()))
            raise invalid("indices", span, f"lie in range({self.num_samples})")
        # A single infinite score would decide all later draws.
        bad = score[~np.isfinite(score)]
        if bad.size:
            hint = "the model has diverged, lower the learning rate"
            raise invalid("scores", bad[:3].tolist(), "be finite", hint)
        self.mark_trained()
        return index, score


class UniformSampler(BatchSampler):
    """Random reshuffling: each epoch is a new permutation, each weight is 1.

    Parameters are those of :class:`BatchSampler`; the last batch of an epoch may be smaller.

    Examples
    --------
    >>> sorted(sum(UniformSampler(6, 3, seed=1), []))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.order = self.rng.permutation(self.num_samples)
        self.position = 0

    def next_batch(self) -> Batch:
        """Take the next ``batch_size`` entries of the epoch's permutation."""
        if self.position >= self.num_samples:
            self.order = self.rng.permutation(self.num_samples)
            self.position = 0
        indices = self.order[self.position : self.position + self.batch_size]
        self.position += len(indices)
        return indices, np.ones(len(indices))

    def state_dict(self) -> StateDict:
        """Return sizes, generator, the epoch's order and the position in it."""
        return super().state_dict() | {"order": self.order.copy(), "position": self.position}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        schema = {"order": ((self.num_samples,), "i"), "position": int}
        check_state(state, schema, type(self).__name__)
        # The parent checks the rest, so nothing changes before the whole state is checked.
        super().load_state_dict(state)
        self.order = np.array(state["order"], np.int64)
        self.position = int(state["position"])


def coverage_and_age(scored_at: NDArray[np.signedinteger], now: int) -> dict[str, float]:
    """Summarise when each sample was scored, -1 where never: share scored and mean age."""
    ages = now - scored_at[scored_at >= 0]
    mean_age = float(ages.mean()) if ages.size else 0.0
    return {"coverage": len(ages) / len(scored_at), "mean-age": mean_age}
