"""Samplers of this package on a node: saved between messages, and following the server."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from flwr_hetero._flwr import log
from flwr_hetero.client import MOD
from flwr_hetero.client.data_pass import batch_size_of, drawn_by, draws_indices, is_ours
from flwr_hetero.client.session import current_session
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
    session = current_session()
    if session is not None:
        session.has_saved = True


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
    state = load_state(context, name)
    if state is None:
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
    session = current_session()
    if session is None:
        raise RuntimeError(f"nothing keeps a sampler without its mod: {MOD}")
    if any(sampler is other for other, _ in session.kept.values()):
        return True
    # A sampler that the app makes for each epoch continues where the one before it has ended.
    if name in session.kept:
        before, _ = session.kept[name]
        before.settle()
        save_state(context, name, before.state_dict())
    session.kept[name] = (sampler, context)
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
    follower = cast("BatchSampler", sampler)
    if follower.needs_model and model is None:
        raise no_model("hetero.batches(loader, msg, model=model)")
    follower.train_model(model)
    follower.read_instruction(configs_in(msg.content))
    session = current_session()
    if session is not None and follower not in session.followers:
        session.followers.append(follower)


def with_sampler(loader: Any, make: SamplerMaker, model: Any) -> Any:
    """Return a copy of a DataLoader with another sampler, the same one throughout a message."""
    batch_size = batch_size_of(loader)
    if not draws_indices(loader) or batch_size < 1:
        hint = "or make the DataLoader with batch_sampler= and leave sampler= out"
        rule = "be a DataLoader with a batch_size, of data with a length, for a sampler"
        raise invalid("loader", type(loader).__name__, rule, hint)
    session = current_session()
    made = {} if session is None else session.made
    num_samples = len(loader.dataset)
    # Several loaders of a message share a sampler, such as one loader for each epoch.
    key = (make, num_samples, batch_size, id(model))
    if key not in made:
        sampler = make(num_samples, batch_size) if callable(make) else None
        if not is_ours(sampler):
            hint = "such as sampler=MercurySampler"
            raise invalid("sampler", make, "be a sampler class of flwr_hetero.sampler", hint)
        if model is not None:
            sampler = sampler.fed_by(model)
        if sampler.learns_from == "priority":
            raise no_model("hetero.batches(loader, msg, sampler=PGDSampler, model=model)")
        made[key] = sampler
    return drawn_by(loader, made[key])


def no_model(hint: str) -> ValueError:
    """Make the error for a sampler that learns from gradients but has no model."""
    return invalid("model", None, "be the model whose gradients the sampler uses", hint)
