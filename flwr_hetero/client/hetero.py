"""The client's part of every method: one mod around the ClientApp, one loader inside it."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable
from flwr_hetero.client.data_pass import (
    LoaderPass,
    Passes,
    Place,
    empty_pass,
    is_ours,
    length_of,
    passes_of,
    plain_pass,
)
from flwr_hetero.client.handler import MOD, current_handler, say_once
from flwr_hetero.client.samplers import SamplerMaker, follow, keep, restore, with_sampler
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
        plain = loader if sampler is not None else None
        if sampler is not None:
            loader = with_sampler(loader, sampler, model)
        steps = StepLoader(loader, msg, plain)
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

    def keep(self, kept: Any, name: str = "kept") -> None:
        """Let an object go on from message to message: it takes up the state of the last one.

        This is for objects that the app creates in each message and that do not go on by
        themselves, such as a schedule of another library. The state may hold tensors, numbers,
        texts, lists and dicts. RuntimeError without the mod.

        Parameters
        ----------
        kept : object
            Has ``state_dict`` and ``load_state_dict``, else ValueError.
        name : str
            Name of the state, another one for each object, else ValueError.

        Examples
        --------
        >>> def train(msg, context):
        ...     schedule = CosineLRScheduler(optimizer, t_initial=1000)
        ...     hetero.keep(schedule)
        """
        if (handler := current_handler()) is None:
            raise RuntimeError(f"nothing keeps an object without the mod: {MOD}")
        if is_ours(kept):
            keep(kept, handler.context, name)
            return
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(kept, method, None)):
                raise invalid("kept", type(kept).__name__, "have state_dict and load_state_dict")
        if "torch" in sys.modules:
            handler.carried.keep(kept, name)
        else:
            handler.kept[name] = kept, handler.context
            restore(kept, handler.context, name)


hetero = Hetero()
"""The client's part: ``ClientApp(mods=[hetero])``, ``hetero.batches(loader, msg)``."""


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    With :data:`~flwr_hetero.mod.hetero` around the ClientApp the pass over the data continues
    from message to message. A loop over epochs stays as it is: as many passes share the steps as
    the app made for the last message; at first ``local-epochs`` of the config or run-config, or 1.
    Each pass has a batch at least, and whole steps of torch optimizers: it goes on until one.
    Without ``num-steps`` it gives the loader's own passes. Without a mod each message starts over.

    A pass while torch's gradients are off is the loader's own and counts nothing, with a sampler of
    this package too. A pass in which no optimizer steps counts nothing either, which is said once.
    ``len`` is the number of batches of the last pass, and before the first one that of the next.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader``, a list, or any other iterable that can be passed over again.
    msg : Message or mapping
        Passed to the ClientApp's ``train`` function, or the ``config`` of ``fit`` of Flower's older
        API. ValueError if it is neither or asks for less than 1, or a pass gives no batch.
    own : iterable of batches, optional
        What a pass without gradients gives, if not ``loader``.

    Examples
    --------
    >>> loader = StepLoader([[1, 2], [3]], {"num-steps": 5})
    >>> [len(batch) for epoch in range(3) for batch in loader], loader.metrics
    ([2, 1, 2, 1, 2, 2, 2], {'num-steps': 7})
    """

    def __init__(
        self,
        loader: Iterable[Any],
        msg: Message | Mapping[str, Any],
        own: Iterable[Any] | None = None,
    ) -> None:
        self._loader, self.num_steps = loader, asked_steps(msg)
        self._own = plain_pass(loader) if own is None else own
        work = current_work()
        if work is None:
            say_once(f"without its mod a loader begins a new pass with each message: {MOD}")
        self._work = work or Work()
        self._work.loader_made |= self.num_steps is not None
        self._passes: Passes | None = None
        # Its number among loaders of the same sizes that are iterated side by side.
        self._index: int | None = None
        self._length: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Give a pass: of the batches asked for its share, or the loader's own."""
        if not gradients_are_on():
            self._length = length_of(self._own)
            yield from self._own
            return
        one = self._work.begin_pass(self, self.num_steps, length_of(self._loader))
        self._length = None if one.asked is None else one.asked
        has_ended = False
        try:
            for batch in self._loader if one.asked is None else self._asked(one, one.asked):
                self._work.count(one, batch_length(batch))
                self._length = max(self._length or 0, one.given)
                yield batch
                self._work.step_done(one)
            has_ended = True
        finally:
            self._work.end_pass(one, has_ended=has_ended)

    def __len__(self) -> int:
        """Batches of the last pass, else of the next one."""
        # Opacus makes of the length the part of the data that a batch is of.
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if not gradients_are_on() or caller.startswith("opacus."):
            return len(self._own)  # type: ignore[arg-type]
        self._work.length_asked = True
        if self.num_steps is None:
            return len(self._loader)  # type: ignore[arg-type]
        return self._work.allotment(self.num_steps) if self._length is None else self._length

    def _asked(self, one: LoaderPass, count: int) -> Iterator[Any]:
        """Give so many batches, of several passes of the loader if need be, or more."""
        more = count
        while more:
            for places, batch in self._given(one, more):
                if one.given >= count and not self._work.wants_more(one):
                    return
                self._work.places |= places
                yield batch
            more = one.given if self._work.wants_more(one) else 0

    def _given(self, one: LoaderPass, count: int) -> Iterator[tuple[dict[str, Place], Any]]:
        """Give batches, each with the place after it where places are kept."""
        sampler = getattr(self._loader, "batch_sampler", None)
        # Samplers of this package know by themselves where they are.
        if self._work.context is not None and not is_ours(sampler):
            self._passes = self._passes or passes_of(self._loader)
        if self._passes is None:
            ours = sampler if is_ours(sampler) else None
            self._work.know_data(0 if ours is None else ours.num_samples)
            for batch in repeated(self._loader, count, ours, is_more=one.given > 0):
                yield {}, batch
            return
        if self._index is None:
            self._index = self._work.alike_before(one, self.sizes)
        self._work.know_data(self._passes.num_examples)
        name, place = self._work.enter(self._passes, self._index)
        for after, batch in self._passes.take(place, count):
            yield {name: after}, batch

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Sizes of the data and of batches, by which places are kept."""
        return (self._passes.size, self._passes.batch_size) if self._passes else None

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


def gradients_are_on() -> bool:
    """Return whether what is computed now may be trained on; without torch it may."""
    torch: Any = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def repeated(
    loader: Iterable[Any], count: int, sampler: "BatchSampler | None", *, is_more: bool
) -> Iterator[Any]:
    """Give so many batches of a loader, pass after pass, led by a sampler of this package."""
    given = 0
    while given < count:
        if (given or is_more) and sampler is not None:
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
