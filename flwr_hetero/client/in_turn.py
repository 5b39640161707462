"""Several batch samplers in turn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import Batch, BatchSampler
from flwr_hetero.errors import invalid
from flwr_hetero.state_dict import StateDict, check_state, entries_below


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
        self.learns = any(sampler.learns for sampler in self.samplers)
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

    def begin_pass(self) -> None:
        """Prepare for an iteration."""
        for sampler in self.samplers:
            sampler.continues = self.continues
            sampler.begin_pass()
        super().begin_pass()

    def give_back(self) -> None:
        """Put back what was drawn ahead and will not be trained."""
        for sampler in self.samplers:
            sampler.give_back()

    def read_instruction(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Let each sampler follow what is for it."""
        for sampler in self.samplers:
            sampler.read_instruction(records)

    def reply_records(self) -> dict[str, Mapping[str, Any]]:
        """Return what each has to say."""
        return {n: r for sampler in self.samplers for n, r in sampler.reply_records().items()}

    @property
    def needs_model(self) -> bool:  # type: ignore[override]
        """Whether one of them looks at gradients."""
        return any(sampler.needs_model for sampler in self.samplers)

    def train_model(self, model: Any) -> None:
        """Name the model to each."""
        for sampler in self.samplers:
            sampler.train_model(model)

    def note_help(self) -> None:
        """Note that the training loop does its part, for all of the samplers."""
        super().note_help()
        for sampler in self.samplers:
            sampler.note_help()

    def missing(self) -> str:
        """Say what the training loop left out, for any of the samplers."""
        return next(filter(None, (sampler.missing() for sampler in self.samplers)), "")

    def take(self) -> Batch:
        """Collect the oldest batch that iteration yielded."""
        batches_ago = len(self._drawn)
        batch = super().take()
        self.current = self.samplers[(self._turn - batches_ago) % len(self.samplers)]
        return batch

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Pass the scores on to the sampler that drew the batch."""
        self.current.update(indices, scores)
        self.note_help()

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
