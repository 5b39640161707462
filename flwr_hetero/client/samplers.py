"""Samplers of this package on a node: kept from message to message, and led by the server."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from flwr_hetero._flwr import log
from flwr_hetero.client.data_pass import batch_size_of, drawn_by, draws_indices, is_ours
from flwr_hetero.client.handler import Handler, current_handler, say_once
from flwr_hetero.errors import invalid
from flwr_hetero.keys import PREFIX
from flwr_hetero.records import read_number
from flwr_hetero.state_dict import StateDict

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler

SamplerMaker = Callable[[int, int], Any]
"""Makes a sampler for a number of samples and a batch size, as the classes do."""
UNHELPED = "unhelped-passes"
"""Passes so far in which the training loop left out what a sampler needs."""
_latest: WeakValueDictionary[tuple[int, str], Any] = WeakValueDictionary()
"""Without a mod: the sampler that owns a state, by context and name."""


def save_state(context: Context, name: str, state: Mapping[str, Any]) -> None:
    """Keep a flat state dict in the node's context until the next message.

    Parameters
    ----------
    context : Context
        The context passed to the ClientApp.
    name : str
        Name of the state, for instance the sampler's.
    state : mapping of str to ndarray, int, float, str or bool
        As from ``sampler.state_dict()``.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> save_state(context, "sampler", UniformSampler(10, 5).state_dict())
    >>> load_state(context, "sampler")["num_samples"]
    10
    >>> restore(UniformSampler(10, 5), context, "sampler")
    True
    """
    arrays = {key: Array(value) for key, value in state.items() if isinstance(value, np.ndarray)}
    scalars = {key: value for key, value in state.items() if key not in arrays}
    context.state[f"{PREFIX}{name}.arrays"] = ArrayRecord(arrays)
    context.state[f"{PREFIX}{name}.scalars"] = ConfigRecord(scalars)
    if (handler := current_handler()) is not None:
        handler.has_saved = True


def load_state(context: Context, name: str) -> StateDict | None:
    """Read what :func:`save_state` kept; None if there is nothing, or if it is damaged."""
    arrays = context.state.array_records.get(f"{PREFIX}{name}.arrays")
    scalars = context.state.config_records.get(f"{PREFIX}{name}.scalars")
    if arrays is None or scalars is None:
        return None
    try:
        state: StateDict = {key: array.numpy() for key, array in arrays.items()}
    except (ValueError, TypeError, EOFError):
        return None
    return state | cast(StateDict, dict(scalars))


def restore(sampler: Any, context: Context, name: str) -> bool:
    """Continue a sampler where an earlier round left it; return whether that was possible.

    Without a saved state it starts from scratch; a state that does not fit the sampler's class
    and sizes is logged and ignored. Parameters are those of :func:`save_state`.
    """
    if (state := load_state(context, name)) is None:
        return False
    try:
        sampler.load_state_dict(state)
    except ValueError as error:
        log(WARNING, "%s of earlier rounds not used: %s", name, error)
        return False
    return True


def keep(sampler: object, context: Context, name: str = "sampler") -> bool:
    """Continue a sampler as :func:`restore` does, and keep its state from now on.

    With :data:`~flwr_hetero.mod.hetero` or another mod of this package around the ClientApp its
    state is kept when the ClientApp's function returns, whatever iterated it. Without a mod that
    happens whenever a pass over the data ends or stops early.

    Parameters
    ----------
    sampler : BatchSampler
        One of :mod:`flwr_hetero.sampler`, else ValueError: the DataLoader's ``batch_sampler``.
    context : Context
        The context passed to the ClientApp.
    name : str
        Name of the state, if there are several.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> sampler = UniformSampler(10, 5)
    >>> keep(sampler, context), len(list(sampler))
    (False, 2)
    >>> keep(UniformSampler(10, 5), context)
    True
    """
    if not is_ours(sampler):
        hint = "make the DataLoader with batch_sampler=MercurySampler(...), for instance"
        if is_ours(getattr(sampler, "batch_sampler", None)):
            hint = "pass loader.batch_sampler"
        kind = f"{type(sampler).__module__}.{type(sampler).__name__}"
        raise invalid("sampler", kind, "be a sampler of flwr_hetero.sampler", hint)
    if (handler := current_handler()) is not None:
        before, _ = handler.kept.get(name, (sampler, context))
        # one made anew for an epoch goes on where that before has ended
        if before is not sampler:
            before.settle()
            _save(before, context, name)
        others = {n: kept for n, kept in handler.kept.items() if kept[0] is not sampler}
        handler.kept = others | {name: (sampler, context)}
    else:
        if (before := _latest.get((id(context), name))) is not None:
            # its iteration may be closed after the next round has begun
            before.on_pass_end = lambda: None
        _latest[id(context), name] = sampler
        sampler.on_pass_end = lambda: _save(sampler, context, name)
    sampler.unhelped_passes = int(read_number(load_state(context, name) or {}, UNHELPED, 0.0))
    return restore(sampler, context, name)


def _save(sampler: "BatchSampler", context: Context, name: str) -> None:
    save_state(context, name, {**sampler.state_dict(), UNHELPED: sampler.unhelped_passes})


class Following:
    """A sampler that follows the server for the time of a message."""

    def __init__(self, sampler: "BatchSampler") -> None:
        self._sampler = sampler

    @property
    def records(self) -> dict[str, ConfigRecord]:
        """Records for the reply, after training: ``RecordDict({..., **following.records})``."""
        self._sampler.settle()
        found = self._sampler.reply_records().items()
        return {name: ConfigRecord(dict(record)) for name, record in found}


def follow(
    sampler: object, msg: Message, context: Context, model: object = None, name: str = "sampler"
) -> Following:
    """Let a sampler follow the server's instruction, answer it, and keep its state.

    For samplers that work with a strategy: ``OrderedSampler`` with ``CDGraB``, and
    ``TopLossSampler`` with ``BiasedLocalSGD``. Train with
    :class:`~flwr_hetero.sampler.WeightedLoss`. A mod of this package around the ClientApp adds
    the answer to the reply, else the returned object has it as ``records``.

    Parameters
    ----------
    sampler, context, name : BatchSampler, Context, str
        As of :func:`keep`.
    msg : Message
        The message passed to the ClientApp.
    model : nn.Module, optional
        The model that is trained, for ``OrderedSampler``: it learns from the gradients.

    Raises
    ------
    ValueError
        If an argument is none of these, or the model is left out where it is needed.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_hetero.fleet import DeviceProfile, LocalGrid
    >>> from flwr_hetero.sampler import TopLossSampler
    >>> grid = LocalGrid(ClientApp(), [DeviceProfile()])  # so that a message can be made
    >>> content = RecordDict({"config": ConfigRecord({"fast": True, "fast-share": 0.5})})
    >>> sampler = TopLossSampler(10, 5)
    >>> follow(sampler, Message(content, 1, "train"), Context(1, 1, {}, RecordDict(), {})).records
    {}
    >>> sampler.fast, sampler.share
    (True, 0.5)
    """
    if not isinstance(msg, Message):
        raise invalid("msg", type(msg).__name__, "be the message passed to the ClientApp")
    keep(sampler, context, name)
    led = cast("BatchSampler", sampler)
    lead(led, msg, model)
    return Following(led)


def lead(sampler: "BatchSampler", msg: Message, model: object) -> None:
    """Let a sampler follow an instruction; a mod adds its answer to the reply."""
    if sampler.needs_model and model is None:
        hint = "hetero.batches(loader, msg, model=model)"
        raise invalid("model", model, "be the model whose gradients the sampler uses", hint)
    sampler.train_model(model)
    sampler.read_instruction(dict(msg.content.config_records.items()))
    if (handler := current_handler()) is not None and sampler not in handler.led:
        handler.led.append(sampler)


def attend(sampler: "BatchSampler", msg: Any, model: Any) -> None:
    """Keep a sampler and let it follow the message, unless the app has done so by hand."""
    handler = current_handler() or Handler()
    # an app that keeps or leads it by hand has its own name for it
    is_kept = any(sampler is each for each, _ in handler.kept.values())
    if handler.context is not None and not is_kept:
        first, _ = handler.kept.get("sampler", (sampler, None))
        kind = type(sampler)
        name = "sampler" if type(first) is kind else f"sampler-{kind.__name__}"
        keep(sampler, handler.context, name)
    message = msg if isinstance(msg, Message) else handler.message
    if message is not None and sampler not in handler.led:
        lead(sampler, message, model)


def with_sampler(loader: Any, make: SamplerMaker, model: Any) -> Any:
    """Return a copy of a DataLoader whose batches another sampler draws; one for a message."""
    batch_size = batch_size_of(loader)
    if not draws_indices(loader) or batch_size < 1:
        hint = "or make the DataLoader with batch_sampler= and leave sampler= out"
        rule = "be a DataLoader with a batch_size, of data with a length, for a sampler"
        raise invalid("loader", type(loader).__name__, rule, hint)
    made = (current_handler() or Handler()).made
    key = (make, num_samples := len(loader.dataset), batch_size, id(model))
    if key not in made:
        sampler = make(num_samples, batch_size) if callable(make) else None
        if not is_ours(sampler):
            hint = "such as sampler=MercurySampler"
            raise invalid("sampler", make, "be a sampler class of flwr_hetero.sampler", hint)
        sampler = sampler if model is None else sampler.fed_by(model)
        if sampler.learns_from == "priority":
            hint = "hetero.batches(loader, msg, sampler=PGDSampler, model=model)"
            raise invalid("model", model, "be the model whose gradients the sampler uses", hint)
        # several loaders of a message share it, as one for each epoch
        made[key] = sampler
    return drawn_by(loader, made[key])


def finish(handler: Handler, *, trained: bool) -> dict[str, Mapping[str, Any]]:
    """Check and save what a ClientApp's function used; return the records for the reply."""
    # first: what was drawn ahead and not trained is in no state and no answer
    for sampler in handler.used:
        sampler.settle()
        if trained:
            sampler.check_help()
    found: dict[str, Mapping[str, Any]] = {}
    for sampler in handler.led:
        found |= sampler.reply_records()
    if trained and handler.work is not None:
        found |= handler.work.finish()
    is_kept = handler.kept or handler.has_saved
    for name, (sampler, context) in handler.kept.items():
        _save(sampler, context, name)
    for sampler in handler.used:
        if trained and sampler.learns and not is_kept:
            say_once(
                f"{type(sampler).__name__} was used but not kept: what it learns is lost after "
                "each round; add: loader = hetero.batches(loader, msg), or without it: "
                "keep(loader.batch_sampler, context)"
            )
    return found
