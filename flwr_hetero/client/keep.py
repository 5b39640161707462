"""A sampler's flat state in ``context.state``, where it outlives the ClientApp process."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.keys import PREFIX
from flwr_hetero.state_dict import StateDict

State = Mapping[str, NDArray[np.generic] | int | float | str | bool]


class Stateful(Protocol):
    """What has a state to continue from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; ValueError if it is not one of its own."""


class Kept(Stateful, Protocol):
    """What can be kept: every batch sampler of this package."""

    on_pass_end: Callable[[], None] | None

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


def keep(sampler: Kept, context: Context, name: str = "sampler") -> bool:
    """Continue a sampler as :func:`restore` does, and keep its state from now on.

    Its state goes to ``context.state`` whenever a pass over the DataLoader ends. Training that
    stops in the middle of a pass should use :func:`~flwr_hetero.mod.restore` and
    :func:`~flwr_hetero.mod.save_state` instead.

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
    sampler.on_pass_end = lambda: save_state(context, name, sampler.state_dict())
    return restore(sampler, context, name)
