"""Samplers of this package on a node: kept from message to message, and led by the server."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from flwr_hetero._flwr import log
from flwr_hetero.client.data_pass import batch_size_of, drawn_by, draws_indices, is_ours
from flwr_hetero.client.handler import MOD, Handler, current_handler, say_once
from flwr_hetero.errors import invalid
from flwr_hetero.keys import PREFIX
from flwr_hetero.records import arrays_in, configs_in
from flwr_hetero.state_dict import StateDict

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler

SamplerMaker = Callable[[int, int], Any]
"""Makes a sampler for a number of samples and a batch size, as the classes do."""


def save_state(context: Context, name: str, state: Mapping[str, Any]) -> None:
    """Keep arrays, numbers and texts in the node's context, under a name, until the next message.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> save_state(context, "sampler", UniformSampler(10, 5).state_dict())
    >>> load_state(context, "sampler")["num_samples"]
    10
    """
    arrays = {key: Array(value) for key, value in state.items() if isinstance(value, np.ndarray)}
    scalars = {key: value for key, value in state.items() if key not in arrays}
    context.state[f"{PREFIX}{name}.arrays"] = ArrayRecord(arrays)
    context.state[f"{PREFIX}{name}.scalars"] = ConfigRecord(scalars)
    if (handler := current_handler()) is not None:
        handler.has_saved = True


def load_state(context: Context, name: str) -> StateDict | None:
    """Read what :func:`save_state` kept; None if there is nothing."""
    arrays = arrays_in(context.state).get(f"{PREFIX}{name}.arrays")
    scalars = configs_in(context.state).get(f"{PREFIX}{name}.scalars")
    if arrays is None or scalars is None:
        return None
    state: StateDict = {key: array.numpy() for key, array in arrays.items()}
    return state | cast(StateDict, dict(scalars))


def restore(sampler: Any, context: Context, name: str) -> bool:
    """Continue a sampler where an earlier round left it; False, logged, if that does not fit.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> restore(UniformSampler(10, 5), context, "sampler")  # nothing has been saved
    False
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
    """Continue a sampler as :func:`restore` does, and keep its state when the app returns.

    RuntimeError without ``ClientApp(mods=[hetero])``, or another mod of this package.

    Parameters
    ----------
    sampler, context : BatchSampler, Context
        The DataLoader's ``batch_sampler``, one of :mod:`flwr_hetero.sampler`, else ValueError; and
        what the ClientApp is passed.
    name : str
        Name of the state, if there are several.

    Examples
    --------
    >>> def train(msg, context):
    ...     sampler = MercurySampler(num_samples=100, batch_size=10)
    ...     keep(sampler, context)
    """
    if not is_ours(sampler):
        hint = "pass loader.batch_sampler, made for instance by batch_sampler=MercurySampler(...)"
        raise invalid("sampler", type(sampler), "be a sampler of flwr_hetero.sampler", hint)
    if (handler := current_handler()) is None:
        raise RuntimeError(f"nothing keeps a sampler without its mod: {MOD}")
    if any(sampler is each for each, _ in handler.kept.values()):
        return True
    # one made anew for an epoch goes on where that before has ended
    if name in handler.kept:
        before, _ = handler.kept[name]
        before.settle()
        save_state(context, name, before.state_dict())
    handler.kept[name] = sampler, context
    return restore(sampler, context, name)


def follow(
    sampler: object, msg: Message, context: Context, model: object = None, name: str = "sampler"
) -> None:
    """Let a sampler follow the server's instruction, and keep it; the mod adds its answer.

    For ``OrderedSampler`` with ``CDGraB`` and ``TopLossSampler`` with ``BiasedLocalSGD``, trained
    with ``WeightedLoss``. Parameters and errors are those of :func:`keep`, and: the message passed
    to the ClientApp; the model that is trained, whose gradients ``OrderedSampler`` needs.

    Examples
    --------
    >>> def train(msg, context):
    ...     sampler = TopLossSampler(num_samples=100, batch_size=10)
    ...     follow(sampler, msg, context)
    """
    if not isinstance(msg, Message):
        raise invalid("msg", type(msg).__name__, "be the message passed to the ClientApp")
    keep(sampler, context, name)
    led = cast("BatchSampler", sampler)
    if led.needs_model and model is None:
        raise no_model("hetero.batches(loader, msg, model=model)")
    led.train_model(model)
    led.read_instruction(dict(configs_in(msg.content).items()))
    if (handler := current_handler()) is not None and led not in handler.led:
        handler.led.append(led)


def with_sampler(loader: Any, make: SamplerMaker, model: Any) -> Any:
    """Return a copy of a DataLoader whose batches another sampler draws; one for a message."""
    batch_size = batch_size_of(loader)
    if not draws_indices(loader) or batch_size < 1:
        hint = "or make the DataLoader with batch_sampler= and leave sampler= out"
        rule = "be a DataLoader with a batch_size, of data with a length, for a sampler"
        raise invalid("loader", type(loader).__name__, rule, hint)
    made = handler.made if (handler := current_handler()) else {}
    key = (make, num_samples := len(loader.dataset), batch_size, id(model))
    if key not in made:
        sampler = make(num_samples, batch_size) if callable(make) else None
        if not is_ours(sampler):
            hint = "such as sampler=MercurySampler"
            raise invalid("sampler", make, "be a sampler class of flwr_hetero.sampler", hint)
        sampler = sampler if model is None else sampler.fed_by(model)
        if sampler.learns_from == "priority":
            raise no_model("hetero.batches(loader, msg, sampler=PGDSampler, model=model)")
        # several loaders of a message share it, as one for each epoch
        made[key] = sampler
    return drawn_by(loader, made[key])


def no_model(hint: str) -> ValueError:
    """Make the error for a sampler that learns from gradients of no model."""
    return invalid("model", None, "be the model whose gradients the sampler uses", hint)


def finish(handler: Handler, *, trained: bool) -> dict[str, Mapping[str, Any]]:
    """Check and save what a ClientApp's function used; return the records for the reply."""
    # first: what was drawn ahead and not trained is in no state and no answer
    for sampler in handler.used:
        sampler.settle()
        if trained and (text := sampler.missing()):
            raise RuntimeError(text)
    found: dict[str, Mapping[str, Any]] = {}
    for sampler in handler.led:
        found |= sampler.reply_records()
    if trained and handler.work is not None:
        found |= handler.work.finish()
        handler.carried.save(handler.work.steps, handler.work.job_steps)
    elif trained:
        handler.carried.save(0, None)
    for name, (sampler, context) in handler.kept.items():
        save_state(context, name, sampler.state_dict())
    for sampler in handler.used:
        if trained and sampler.learns and not handler.has_saved:
            hint = "loader = hetero.batches(loader, msg), or keep(loader.batch_sampler, context)"
            name = type(sampler).__name__
            say_once(f"{name} is not kept: what it learns is lost after each round; add: {hint}")
    return found
