"""A loader that gives as many batches as the server asks for, and counts them for the reply."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero.errors import check_count, invalid


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    The ``num-steps`` of the instruction count for the message as a whole: the first ``for``
    repeats the loader as often as needed, a later one gives what is left, so that a loop over
    epochs stays as it is. Without ``num-steps`` the loader's own passes are given.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader``, a list, or any other iterable that can be passed over again.
    msg : Message
        The message passed to the ClientApp's ``train`` function.

    Attributes
    ----------
    num_steps : int or None
        Batches asked for; ``len()`` is the same.
    metrics : dict of str to int
        ``num-steps`` and ``examples-processed`` so far, for the reply's ``MetricRecord``; the
        latter only if batches hold tensors or arrays. Batches taken ahead count.

    Raises
    ------
    ValueError
        If an argument is none of these, ``num-steps`` is below 1, or a pass gives no batch.

    Notes
    -----
    Other attributes are the loader's. In Lightning and in Hugging Face's Trainer, take one epoch.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ConfigRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_hetero.fleet import DeviceProfile, LocalGrid
    >>> grid = LocalGrid(ClientApp(), [DeviceProfile()])  # so that a message can be made
    >>> content = RecordDict({"config": ConfigRecord({"num-steps": 5})})
    >>> loader = StepLoader([np.zeros(32), np.zeros(8)], Message(content, 1, "train"))
    >>> [len(batch) for epoch in range(3) for batch in loader]
    [32, 8, 32, 8, 32]
    >>> loader.metrics
    {'num-steps': 5, 'examples-processed': 112}
    """

    def __init__(self, loader: Iterable[Any], msg: Message) -> None:
        if not isinstance(msg, Message):
            raise invalid("msg", type(msg).__name__, "be the message passed to the ClientApp")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise invalid("loader", type(loader).__name__, "give batches when it is iterated")
        self._loader, self.num_steps = loader, asked_steps(msg)
        self._steps, self._examples, self._has_sizes = 0, 0, True

    def __iter__(self) -> Iterator[Any]:
        """Give what is left of the batches asked for, or a pass over the loader."""
        if self.num_steps is None:
            yield from map(self._count, self._loader)
            return
        before = None
        while self._steps < self.num_steps:
            if before is not None and hasattr(sampler := self._batch_sampler, "continues"):
                sampler.continues = True  # the last batch may be in use when the next is drawn
            before = self._steps
            for batch in self._loader:
                yield self._count(batch)
                if self._steps >= self.num_steps:
                    return
            if self._steps == before:
                hint = "pass the loader, not an iterator, and data that fill a batch"
                raise invalid("loader", "a pass without one", "give a batch in every pass", hint)

    def __len__(self) -> int:
        """Batches in all: those asked for, else those of a pass."""
        return len(self._loader) if self.num_steps is None else self.num_steps  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        found = {keys.NUM_STEPS: self._steps}
        return found | ({keys.EXAMPLES_PROCESSED: self._examples} if self._has_sizes else {})

    @property
    def _batch_sampler(self) -> Any:
        return getattr(self._loader, "batch_sampler", None)

    def _count(self, batch: Any) -> Any:
        size = batch_length(batch)
        self._steps, self._examples = self._steps + 1, self._examples + (size or 0)
        self._has_sizes &= size is not None
        return batch


def asked_steps(msg: Message) -> int | None:
    """Return the ``num-steps`` of an instruction, from the first ConfigRecord that has it."""
    for config in msg.content.config_records.values():
        if keys.NUM_STEPS in config:
            return check_count(keys.NUM_STEPS, config[keys.NUM_STEPS], 1)
    return None


def batch_length(batch: Any) -> int | None:
    """Return the length of the first tensor or array in a batch; None if it has none."""
    if shape := getattr(batch, "shape", None):
        return int(shape[0])
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (Mapping, tuple, list)):
        return None
    return next((size for part in parts if (size := batch_length(part)) is not None), None)
