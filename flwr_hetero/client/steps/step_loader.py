"""A loader that gives as many batches as the server asks for, and counts them for the reply."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero.client.handler import say_once
from flwr_hetero.client.steps.source import Source, empty_pass, is_ours, source_of
from flwr_hetero.client.steps.work import Work, current_work
from flwr_hetero.errors import check_count, invalid

MOD = "add to the ClientApp: from flwr_hetero.mod import hetero; app = ClientApp(mods=[hetero])"


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    With :data:`~flwr_hetero.mod.hetero` around the ClientApp the pass over the data goes on from
    message to message, so that few steps a message miss no example. A loop over epochs stays as it
    is: its passes share the ``num-steps`` of the message. Without ``num-steps`` the loader's own
    passes are given. Without a mod each message begins anew, and the first ``for`` takes all steps.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader``, a list, or any other iterable that can be passed over again.
    msg : Message or mapping
        The message passed to the ClientApp's ``train`` function, or the ``config`` passed to
        ``fit`` of Flower's older API.

    Attributes
    ----------
    num_steps : int or None
        Batches asked for in the message; ``len()`` is those of one pass.
    metrics : dict of str to int
        ``num-steps`` and ``examples-processed`` of the message so far; the latter only if batches
        hold tensors or arrays. Batches taken ahead count. The mod reports them by itself.

    Raises
    ------
    ValueError
        If an argument is none of these, ``num-steps`` is below 1, or a pass gives no batch.

    Notes
    -----
    Other attributes are the loader's. In Lightning and in Hugging Face's Trainer, take one epoch.

    So many passes share the steps as the app made over its data for the message before; at first
    ``local-epochs`` of the run-config, or 1. A pass more than these gives nothing.

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

    def __init__(self, loader: Iterable[Any], msg: Message | Mapping[str, Any]) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise invalid("loader", type(loader).__name__, "give batches when it is iterated")
        self._loader, self.num_steps = loader, asked_steps(msg)
        work = current_work()
        if work is None:
            say_once(f"without its mod a loader begins a new pass with each message: {MOD}")
        elif self.num_steps is not None and (work.planned or 1) > 1:
            say_once("the server sets the steps of a message: the app's local epochs share them")
        self._work = work or Work()
        self._source: Source | None = None

    def __iter__(self) -> Iterator[Any]:
        """Give a pass: of the batches asked for its share, or the loader's own."""
        count = self._work.begin_pass(self.num_steps, self._full_length())
        for batch in self._loader if self.num_steps is None else self._asked(count):
            self._work.count(batch_length(batch))
            yield batch
            self._work.step_done()
        self._work.end_pass()

    def __len__(self) -> int:
        """Batches of a pass: the share of those asked for, else the loader's."""
        if self.num_steps is None:
            return len(self._loader)  # type: ignore[arg-type]
        return self._work.allotment(self.num_steps)

    def _asked(self, count: int) -> Iterator[Any]:
        """Give so many batches, of several passes of the loader if need be."""
        if count == 0:
            return
        if self._goes_on():
            yield from self._placed(count)
        else:
            yield from self._repeated(count)

    def _goes_on(self) -> bool:
        """Return whether the pass is entered where the last message left it.

        Samplers of this package know it themselves.
        """
        if self._work.planned is None or is_ours(self._batch_sampler):
            return False
        if self._source is None:
            self._source = source_of(self._loader)
        return self._source is not None

    def _placed(self, count: int) -> Iterator[Any]:
        assert self._source is not None
        for place, batch in self._source.take(self._work.place(self._source), count):
            self._work.move(place)
            yield batch

    def _repeated(self, count: int) -> Iterator[Any]:
        given = 0
        while given < count:
            if given and hasattr(sampler := self._batch_sampler, "continues"):
                sampler.continues = True  # the last batch may be in use when the next is drawn
            before = given
            for batch in self._loader:
                given += 1
                yield batch
                if given >= count:
                    self._settle()
                    return
            if given == before:
                raise empty_pass()

    def _settle(self) -> None:
        """Give back what workers drew ahead: the next pass begins before they are gone."""
        if self._work.planned is not None and is_ours(self._batch_sampler):
            self._batch_sampler.settle()

    def _full_length(self) -> int | None:
        with suppress(TypeError, NotImplementedError):
            return len(self._loader)  # type: ignore[arg-type]
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        return self._work.metrics

    @property
    def _batch_sampler(self) -> Any:
        return getattr(self._loader, "batch_sampler", None)

    def criterion(self, loss_fn: Any = None) -> Any:
        """Make the loss to train with: weighted and learnt from where a sampler of ours draws.

        Parameters
        ----------
        loss_fn : callable, optional
            As ``nn.CrossEntropyLoss()``, which it is if left out.

        Returns
        -------
        nn.Module or callable
            A :class:`~flwr_hetero.sampler.SampledLoss`; without such a sampler the mean loss.
        """
        from flwr_hetero.client.sampled_loss import criterion_for  # needs torch

        return criterion_for(self._batch_sampler, loss_fn)


def asked_steps(msg: object) -> int | None:
    """Return the ``num-steps`` of an instruction, from the first ConfigRecord that has it."""
    if isinstance(msg, Message):
        records: list[Mapping[str, Any]] = list(msg.content.config_records.values())
    elif isinstance(config := getattr(msg, "config", msg), Mapping):
        records = [config]
    else:
        rule = "be the message passed to the ClientApp, or the config passed to fit"
        raise invalid("msg", type(msg).__name__, rule)
    for record in records:
        if keys.NUM_STEPS in record:
            return check_count(keys.NUM_STEPS, record[keys.NUM_STEPS], 1)
    return None


def batch_length(batch: Any) -> int | None:
    """Return the length of the first tensor or array in a batch; None if it has none."""
    if shape := getattr(batch, "shape", None):
        return int(shape[0])
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (Mapping, tuple, list)):
        return None
    return next((size for part in parts if (size := batch_length(part)) is not None), None)
