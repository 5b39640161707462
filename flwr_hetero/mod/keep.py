"""Carry a sampler from round to round in one line."""

from collections.abc import Callable
from typing import Protocol

from flwr.app import Context

from flwr_hetero.mod.state import State, Stateful, restore, save_state


class Kept(Stateful, Protocol):
    """What can be kept: every batch sampler of this package."""

    on_pass_end: Callable[[], None] | None

    def state_dict(self) -> State:
        """Return what is needed to continue."""


def keep(sampler: Kept, context: Context, name: str = "sampler") -> bool:
    """Continue a sampler where an earlier round left it, and keep it from now on.

    Its state goes to ``context.state`` whenever a pass over the DataLoader ends. Training that
    stops in the middle of a pass should use :func:`~flwr_hetero.mod.restore` and
    :func:`~flwr_hetero.mod.save_state` instead.

    Parameters
    ----------
    sampler : BatchSampler
        New; of the same class and sizes as in the round before.
    context : Context
        The context handed to the ClientApp.
    name : str
        Of the state, where a node has several samplers.

    Returns
    -------
    bool
        Whether there was a usable state to continue from.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr_hetero.sampler import MercurySampler
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> sampler = MercurySampler(10, 5)
    >>> keep(sampler, context), len(list(sampler))
    (False, 2)
    >>> keep(MercurySampler(10, 5), context)
    True
    """
    sampler.on_pass_end = lambda: save_state(context, name, sampler.state_dict())
    return restore(sampler, context, name)
