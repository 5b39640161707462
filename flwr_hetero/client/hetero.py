"""The client's part of every method: one mod around the ClientApp, one loader inside it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable
from flwr_hetero.client.data_pass import Passes, empty_pass, is_ours, length_of, passes_of
from flwr_hetero.client.handler import MOD, current_handler, say_once
from flwr_hetero.client.samplers import SamplerMaker, follow, with_sampler
from flwr_hetero.client.timing import timing
from flwr_hetero.client.work import Work, current_work
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.records import configs_in

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler


class Hetero:
    """The mod ``hetero`` and what a ClientApp's function asks of it.

    As a mod it adds times, steps and the samplers' metrics to a reply, which Flower ignores. It
    keeps the samplers' state and the place in the pass over the data.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[Hetero()])  # or hetero, which is one
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; Flower calls this."""
        return timing(message, context, call_next)

    def batches(
        self,
        loader: Iterable[Any],
        msg: Message | Mapping[str, Any],
        sampler: SamplerMaker | None = None,
        model: Any = None,
    ) -> "StepLoader":
        """Give the batches that the server asks for; the next message continues there.

        Parameters
        ----------
        loader, msg : iterable of batches, Message or mapping
            As of :class:`StepLoader`, whose errors are raised as well. A sampler of this package in
            the loader is kept and follows the server.
        sampler : class of flwr_hetero.sampler, optional
            Put in place of the loader's own; or a function of the number of samples and the batch
            size that makes one. Train then with ``criterion()`` of the result.
        model : nn.Module, optional
            The model that is trained, for samplers that learn from its gradients.

        Examples
        --------
        >>> [len(batch) for batch in hetero.batches([[1, 2], [3, 4], [5]], {"num-steps": 4})]
        [2, 2, 1, 2]
        """
        if sampler is not None:
            loader = with_sampler(loader, sampler, model)
        steps = StepLoader(loader, msg)
        own, handler = getattr(loader, "batch_sampler", None), current_handler()
        # an app may have let it follow by hand
        if is_ours(own) and handler is not None and own not in handler.led:
            # apps of the older API have a config in place of the message
            message = msg if isinstance(msg, Message) else handler.message
            follow(own, message, handler.context, model)
        return steps

    def num_steps(
        self,
        msg: Message | Mapping[str, Any],
        default: int | None = None,
        batch_size: int | None = None,
    ) -> int | None:
        """Return the steps that the server asks for, else ``default``: for code without a loader.

        The mod reports them, and with the examples of a step, ``batch_size``, those processed.

        Examples
        --------
        >>> hetero.num_steps({"num-steps": 4}, default=20), hetero.num_steps({}, default=20)
        (4, 20)
        """
        for name, value in (("default", default), ("batch_size", batch_size)):
            if value is not None:
                check_count(name, value, 1)
        asked = asked_steps(msg)
        steps = default if asked is None else asked
        if (work := current_work()) is None:
            say_once(f"without its mod hetero.num_steps reports nothing to the server: {MOD}")
        elif steps is not None:
            work.state(steps, batch_size, default)
        return steps


hetero = Hetero()
"""The client's part: ``ClientApp(mods=[hetero])``, ``hetero.batches(loader, msg)``."""


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    With :data:`~flwr_hetero.mod.hetero` around the ClientApp the pass over the data continues
    from message to message. A loop over epochs stays as it is: as many passes share the steps as
    the app made for the last message; at first ``local-epochs`` of the run-config, or 1. Without
    ``num-steps`` it gives the loader's own passes. Without a mod each message starts over.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader``, a list, or any other iterable that can be passed over again.
    msg : Message or mapping
        Passed to the ClientApp's ``train`` function, or the ``config`` of ``fit`` of Flower's older
        API. ValueError if it is neither or asks for less than 1, or a pass gives no batch.

    Examples
    --------
    >>> loader = StepLoader([[1, 2], [3]], {"num-steps": 5})
    >>> [len(batch) for epoch in range(3) for batch in loader], loader.metrics
    ([2, 1, 2, 1, 2], {'num-steps': 5})
    """

    def __init__(self, loader: Iterable[Any], msg: Message | Mapping[str, Any]) -> None:
        self._loader, self.num_steps = loader, asked_steps(msg)
        work = current_work()
        if work is None:
            say_once(f"without its mod a loader begins a new pass with each message: {MOD}")
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
        if not count:
            return
        own = getattr(self._loader, "batch_sampler", None)
        # samplers of this package know by themselves where they are
        if self._work.context is not None and not is_ours(own):
            self._passes = self._passes or passes_of(self._loader)
        if self._passes is None:
            yield from repeated(self._loader, count, own if is_ours(own) else None)
            return
        for place, batch in self._passes.take(self._work.enter(self._passes), count):
            self._work.place = place
            yield batch

    def __getattr__(self, name: str) -> Any:
        # of a copy that is being made
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and, of batches with tensors or arrays, examples so far; the mod reports them."""
        return self._work.metrics

    def criterion(self, loss_fn: Any = None) -> Any:
        """Make the loss of ``loss_fn`` or cross-entropy, from which a sampler of ours learns."""
        # needs torch
        from flwr_hetero.client.weighted_loss import criterion_for

        return criterion_for(getattr(self._loader, "batch_sampler", None), loss_fn)


def repeated(loader: Iterable[Any], count: int, sampler: "BatchSampler | None") -> Iterator[Any]:
    """Give so many batches of a loader, pass after pass, led by a sampler of this package."""
    given = 0
    while given < count:
        if given and sampler is not None:
            # the last batch may be in use when the next is drawn
            sampler.continues = True
        before = given
        for given, batch in enumerate(loader, before + 1):
            yield batch
            if given == count:
                # workers have drawn ahead: the next pass begins before they are gone
                if sampler is not None:
                    sampler.settle()
                return
        if given == before:
            raise empty_pass()


def asked_steps(msg: object) -> int | None:
    """Return the ``num-steps`` of an instruction, from the first ConfigRecord that has it."""
    if isinstance(msg, Message):
        records: list[Mapping[str, Any]] = list(configs_in(msg.content).values())
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
