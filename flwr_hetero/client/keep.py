"""A sampler's flat state in ``context.state``, where it outlives the ClientApp process."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.client.handler import current_handler
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.keys import PREFIX
from flwr_hetero.records import read_number
from flwr_hetero.state_dict import StateDict

State = Mapping[str, NDArray[np.generic] | int | float | str | bool]


class Stateful(Protocol):
    """What has a state to continue from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; ValueError if it is not one of its own."""


@runtime_checkable
class Kept(Stateful, Protocol):
    """What can be kept: every batch sampler of this package."""

    on_pass_end: Callable[[], None] | None
    on_missing: str
    unhelped_passes: int

    def state_dict(self) -> State:
        """Return what is needed to continue."""


def save_state(context: Context, name: str, state: State) -> None:
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
    >>> import numpy as np
    >>> from flwr.app import RecordDict
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> save_state(context, "sampler", {"order": np.arange(3), "position": 2})
    >>> load_state(context, "sampler")
    {'order': array([0, 1, 2]), 'position': 2}
    """
    arrays = {key: Array(value) for key, value in state.items() if isinstance(value, np.ndarray)}
    scalars = {key: value for key, value in state.items() if key not in arrays}
    context.state[f"{PREFIX}{name}.arrays"] = ArrayRecord(arrays)
    context.state[f"{PREFIX}{name}.scalars"] = ConfigRecord(scalars)  # type: ignore[arg-type]
    if (handler := current_handler()) is not None:
        handler.has_saved = True


def load_state(context: Context, name: str) -> StateDict | None:
    """Read what :func:`save_state` kept.

    None if the node has no state of that name (first message, or restarted) or it is damaged.
    """
    arrays = context.state.array_records.get(f"{PREFIX}{name}.arrays")
    scalars = context.state.config_records.get(f"{PREFIX}{name}.scalars")
    if arrays is None or scalars is None:
        return None
    try:
        state: StateDict = {key: array.numpy() for key, array in arrays.items()}
    except (ValueError, TypeError, EOFError):
        return None
    return state | cast(StateDict, dict(scalars))


def restore(sampler: Stateful, context: Context, name: str) -> bool:
    """Continue a sampler where an earlier round left it; return whether that was possible.

    Without a saved state it starts from scratch; a state that does not fit the sampler's class
    and sizes is logged and ignored. Parameters are those of :func:`save_state`.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.client.batch_sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> restore(UniformSampler(10, 5), context, "sampler")
    False
    >>> save_state(context, "sampler", UniformSampler(10, 5).state_dict())
    >>> restore(UniformSampler(10, 5), context, "sampler")
    True
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


def keep(
    sampler: object, context: Context, name: str = "sampler", *, on_missing: str = "raise"
) -> bool:
    """Continue a sampler as :func:`restore` does, and keep its state from now on.

    With :func:`~flwr_hetero.mod.timing` or :func:`~flwr_hetero.mod.emulated_device` around the
    ClientApp its state goes to ``context.state`` when the ClientApp's function returns, whatever
    iterated it. Without a mod it goes there whenever a pass over the data ends or stops early.

    Parameters
    ----------
    sampler : BatchSampler
        One of :mod:`flwr_hetero.sampler`: the ``batch_sampler`` of the DataLoader.
    context : Context
        The context passed to the ClientApp.
    name : str
        Name of the state, if there are several.
    on_missing : {"raise", "warn"}
        What to do if the training loop leaves out what the sampler needs.

    Raises
    ------
    ValueError
        If the sampler is none of this package.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.client.batch_sampler import UniformSampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> sampler = UniformSampler(10, 5)
    >>> keep(sampler, context), len(list(sampler))
    (False, 2)
    >>> keep(UniformSampler(10, 5), context)
    True
    """
    if not isinstance(sampler, Kept):
        hint = "make the DataLoader with batch_sampler=MercurySampler(...), for instance"
        if isinstance(getattr(sampler, "batch_sampler", None), Kept):
            hint = "pass loader.batch_sampler"
        kind = f"{type(sampler).__module__}.{type(sampler).__name__}"
        raise invalid("sampler", kind, "be a sampler of flwr_hetero.sampler", hint)
    sampler.on_missing = check_choice("on_missing", on_missing, ("raise", "warn"))
    handler, key = current_handler(), (id(context), name)

    def save() -> None:
        state = {**sampler.state_dict(), UNHELPED: sampler.unhelped_passes}
        save_state(context, name, state)

    def save_unless_replaced() -> None:  # a pass may be closed after the next round has begun
        if _latest.get(key) is sampler:
            save()

    if handler is not None:
        handler.saves[id(sampler)] = save
    else:
        _latest[key] = sampler
        sampler.on_pass_end = save_unless_replaced
    state = load_state(context, name)
    sampler.unhelped_passes = int(read_number(state or {}, UNHELPED, 0.0))
    return restore(sampler, context, name)


UNHELPED = "unhelped-passes"
"""Passes so far in which the training loop left out what a sampler needs."""
_latest: WeakValueDictionary[tuple[int, str], Kept] = WeakValueDictionary()
"""The sampler that owns a state, by context and name."""
