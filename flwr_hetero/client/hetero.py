"""The client's part of every method: one mod around the ClientApp, one loader inside it."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Context, Message

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable
from flwr_hetero.client import MOD, warn_once
from flwr_hetero.client.data_pass import LoaderPass, Passes, Place, is_ours, length_of, plain_pass
from flwr_hetero.client.samplers import SamplerMaker, follow, keep, restore, with_sampler
from flwr_hetero.client.session import Session, current_session
from flwr_hetero.client.timing import timing
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.records import configs_in


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
            As for :class:`StepLoader`, whose errors are raised as well. A sampler of this package
            in the loader is kept and follows the server.
        sampler : class of flwr_hetero.sampler, optional
            It takes the place of the loader's own sampler. A function that makes one from the
            number of samples and the batch size will do. Train then with ``criterion()`` of the
            result.
        model : nn.Module, optional
            The model that is trained, for samplers that learn from its gradients.

        Examples
        --------
        >>> [len(batch) for batch in hetero.batches([[1, 2], [3, 4], [5]], {"num-steps": 4})]
        [2, 2, 1, 2]
        """
        plain = None
        if sampler is not None:
            plain = loader
            loader = with_sampler(loader, sampler, model)
        steps = StepLoader(loader, msg, plain)
        session = current_session()
        batch_sampler = getattr(loader, "batch_sampler", None)
        if session is None or not is_ours(batch_sampler):
            return steps
        # The app may have called follow() itself.
        if batch_sampler not in session.followers:
            # Apps of Flower's older API have a config instead of the message.
            message = msg if isinstance(msg, Message) else session.message
            follow(batch_sampler, message, session.context, model)
        return steps

    def num_steps(
        self,
        msg: Message | Mapping[str, Any],
        default: int | None = None,
        batch_size: int | None = None,
    ) -> int | None:
        """Return the steps that the server asks for, else ``default``: for code without a loader.

        The mod reports them to the server. With the examples of a step, ``batch_size``, it also
        reports the examples processed.

        Examples
        --------
        >>> hetero.num_steps({"num-steps": 4}, default=20), hetero.num_steps({}, default=20)
        (4, 20)
        """
        for name, value in (("default", default), ("batch_size", batch_size)):
            if value is not None:
                check_count(name, value, 1)
        steps = asked_steps(msg)
        if steps is None:
            steps = default
        session = current_session()
        if session is None:
            warn_once(f"without its mod hetero.num_steps reports nothing to the server: {MOD}")
            return steps
        session.work.is_used = True
        if steps is not None:
            session.work.state(steps, batch_size, default)
        return steps

    def keep(self, kept: Any, name: str = "kept") -> None:
        """Let an object continue from message to message: it takes up the state of the last one.

        This is for objects that the app creates in each message and that do not continue by
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
        session = current_session()
        if session is None:
            raise RuntimeError(f"nothing keeps an object without the mod: {MOD}")
        if is_ours(kept):
            keep(kept, session.context, name)
            return
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(kept, method, None)):
                raise invalid("kept", type(kept).__name__, "have state_dict and load_state_dict")
        if "torch" in sys.modules:
            session.carried.keep(kept, name)
        else:
            session.kept[name] = (kept, session.context)
            restore(kept, session.context, name)


hetero = Hetero()
"""The client's part: ``ClientApp(mods=[hetero])``, ``hetero.batches(loader, msg)``."""


class StepLoader:
    """Give the number of batches that the server asks for: as many optimisation steps.

    With :data:`~flwr_hetero.mod.hetero` around the ClientApp the pass over the data continues
    from message to message. A loop over epochs stays as it is: as many passes share the steps as
    the app made for the last message; at first ``local-epochs`` of the config or run-config, or 1.
    Each pass has at least one batch, and whole steps of torch optimizers. Without ``num-steps`` it
    gives the loader's own passes. Without a mod each message starts over.

    A pass while torch's gradients are off is the loader's own and does not count as training, also
    with a sampler of this package. Nor does a pass in which no optimizer steps, which is logged
    once. ``len`` is the number of batches of the last pass, and before it that of the next one.

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
        self._loader = loader
        self.num_steps = asked_steps(msg)
        self._own = plain_pass(loader) if own is None else own
        session = current_session()
        if session is None:
            warn_once(f"without its mod a loader begins a new pass with each message: {MOD}")
            session = Session()
        self._work = session.work
        self._work.is_used = True
        if self.num_steps is not None:
            self._work.loader_made = True
        self._number = self._work.num_loaders
        self._work.num_loaders += 1
        self._passes: Passes | None = None
        # Number of this loader among those of the same sizes that are iterated side by side.
        self._index: int | None = None
        self._last_pass: LoaderPass | None = None

    def __iter__(self) -> Iterator[Any]:
        """Give a pass: its share of the batches asked for, or the loader's own pass."""
        if not gradients_are_on():
            self._last_pass = LoaderPass(self._number, length_of(self._own), -1)
            yield from self._own
            return
        current = self._work.begin_pass(self._number, self.num_steps, length_of(self._loader))
        self._last_pass = current
        batches = self._loader
        if current.asked is not None:
            batches = self._asked(current, current.asked)
        yield from self._work.give(current, batches)

    def __len__(self) -> int:
        """Batches of the last pass, else of the next one."""
        # Opacus divides the size of the data by the length to get the size of a batch.
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if not gradients_are_on() or caller.startswith("opacus."):
            return len(self._own)  # type: ignore[arg-type]
        self._work.carried.length_asked = True
        if self.num_steps is None:
            return len(self._loader)  # type: ignore[arg-type]
        if self._last_pass is None:
            return self._work.allotment(self.num_steps)
        return max(self._last_pass.asked or 0, self._last_pass.given)

    def _asked(self, current: LoaderPass, count: int) -> Iterator[Any]:
        """Give ``count`` batches, and more until they hold a whole optimizer step."""
        missing = count
        while missing:
            for places, batch in self._given(current, missing):
                if current.given >= count and not self._work.wants_more(current):
                    return
                self._work.places |= places
                yield batch
            missing = current.given if self._work.wants_more(current) else 0

    def _given(self, current: LoaderPass, count: int) -> Iterator[tuple[dict[str, Place], Any]]:
        """Give ``count`` batches of one or more passes, each with the place after it, if kept."""
        work = self._work
        if self._passes is None:
            self._passes = Passes(self._loader, has_mod=work.context is not None)
        passes = self._passes
        work.data_size = max(work.data_size, passes.num_examples)
        if not passes.keeps_place:
            place = Place(-1, -1, 0, number=0 if current.given == 0 else 1)
            for _, batch in passes.take(place, count):
                yield {}, batch
            return
        current.sizes = (passes.size, passes.batch_size)
        if self._index is None:
            self._index = current.num_equal_before()
        name, place = work.enter(passes, self._index)
        for after, batch in passes.take(place, count):
            yield {name: after}, batch

    def __getattr__(self, name: str) -> Any:
        # While a copy is being made, it has no loader yet.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and, of batches with tensors or arrays, examples so far; the mod reports them."""
        return self._work.metrics

    def criterion(self, loss_fn: Any = None) -> Any:
        """Make the loss of ``loss_fn`` or cross-entropy, from which a sampler of ours learns."""
        # This module needs torch.
        from flwr_hetero.client.weighted_loss import criterion_for

        return criterion_for(getattr(self._loader, "batch_sampler", None), loss_fn)


def gradients_are_on() -> bool:
    """Return whether results of a computation may be trained on now; without torch they may."""
    torch: Any = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def asked_steps(msg: object) -> int | None:
    """Return the ``num-steps`` of an instruction, from the first ConfigRecord that has it."""
    if isinstance(msg, Message):
        records: list[Mapping[str, Any]] = list(configs_in(msg.content).values())
    else:
        config = getattr(msg, "config", msg)
        if not isinstance(config, Mapping):
            rule = "be the message passed to the ClientApp, or the config passed to fit"
            raise invalid("msg", type(msg).__name__, rule)
        records = [config]
    for record in records:
        if keys.NUM_STEPS in record:
            return check_count(keys.NUM_STEPS, record[keys.NUM_STEPS], 1)
    return None
