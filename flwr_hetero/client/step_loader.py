"""A loader that gives as many batches as the server asks for, and counts them for the reply."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message

from flwr_hetero import keys
from flwr_hetero.client.data_pass import Passes, empty_pass, is_ours, length_of, passes_of
from flwr_hetero.client.handler import say_once
from flwr_hetero.client.work import Work, current_work
from flwr_hetero.errors import check_count, invalid

MOD = "add to the ClientApp: from flwr_hetero.mod import hetero; app = ClientApp(mods=[hetero])"


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    With :data:`~flwr_hetero.mod.hetero` around the ClientApp the pass over the data goes on from
    message to message, so that few steps a message miss no example. A loop over epochs stays as it
    is: as many passes share the steps as the app made for the message before; at first
    ``local-epochs`` of the run-config, or 1. Without ``num-steps`` the loader's own passes are
    given. Without a mod each message begins anew, and the first ``for`` takes all steps.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader``, a list, or any other iterable that can be passed over again. Attributes
        that are not here are the loader's.
    msg : Message or mapping
        The message passed to the ClientApp's ``train`` function, or the ``config`` passed to
        ``fit`` of Flower's older API.

    Attributes
    ----------
    num_steps : int or None
        Batches asked for in the message; ``len()`` is those of one pass.
    metrics : dict of str to int
        ``num-steps`` and ``examples-processed`` of the message so far; the latter only if batches
        hold tensors or arrays. The mod reports them by itself.

    Raises
    ------
    ValueError
        If an argument is none of these, ``num-steps`` is below 1, or a pass gives no batch.

    Examples
    --------
    >>> import numpy as np
    >>> loader = StepLoader([np.zeros(32), np.zeros(8)], {"num-steps": 5})
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
        elif self.num_steps is not None and work.planned > 1:
            say_once("the server sets the steps of a message: the app's local epochs share them")
        self._work = work or Work()
        self._passes: Passes | None = None

    def __iter__(self) -> Iterator[Any]:
        """Give a pass: of the batches asked for its share, or the loader's own."""
        count = self._work.begin_pass(self.num_steps, length_of(self._loader))
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
        own = getattr(self._loader, "batch_sampler", None)
        is_kept = self._work.context is not None
        if count and is_kept and not is_ours(own):  # ours know by themselves where they are
            self._passes = self._passes or passes_of(self._loader)
        if count and self._passes is not None:
            for place, batch in self._passes.take(self._work.enter(self._passes), count):
                self._work.place = place
                yield batch
            return
        given = 0
        while given < count:
            if given and is_ours(own):
                own.continues = True  # the last batch may be in use when the next is drawn
            before = given
            for given, batch in enumerate(self._loader, before + 1):
                yield batch
                if given == count:
                    if is_kept and is_ours(own):  # workers draw ahead, and are gone later
                        own.settle()
                    return
            if given == before:
                raise empty_pass()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        return self._work.metrics

    def criterion(self, loss_fn: Any = None) -> Any:
        """Make the loss to train with, of ``loss_fn`` or cross-entropy.

        A :class:`~flwr_hetero.sampler.WeightedLoss` where a sampler of this package draws, which
        learns from it; else the mean loss.
        """
        from flwr_hetero.client.weighted_loss import criterion_for  # needs torch

        return criterion_for(getattr(self._loader, "batch_sampler", None), loss_fn)


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
