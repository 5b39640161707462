"""Samplers of this package in a loader of the node: put in place, led and kept by themselves."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from flwr_hetero.client.follow import lead
from flwr_hetero.client.handler import Handler, current_handler
from flwr_hetero.client.keep import keep
from flwr_hetero.client.steps.source import batch_size_of, drawn_by, draws_indices, is_ours
from flwr_hetero.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler

SamplerMaker = Callable[[int, int], Any]
"""Makes a sampler for a number of samples and a batch size, as the classes do."""


def with_sampler(loader: Any, make: SamplerMaker, model: Any) -> Any:
    """Return a copy of a DataLoader whose batches another sampler draws; one for a message."""
    batch_size = batch_size_of(loader)
    if not draws_indices(loader) or batch_size < 1:
        hint = "or make the DataLoader with batch_sampler= and leave sampler= out"
        rule = "be a DataLoader with a batch_size, of data with a length, for a sampler"
        raise invalid("loader", type(loader).__name__, rule, hint)
    handler = current_handler()
    made = {} if handler is None else handler.made
    key = (make, len(loader.dataset), batch_size, id(model))
    if key not in made:
        made[key] = _made(make, len(loader.dataset), batch_size, model)
    return drawn_by(loader, made[key])


def _made(make: SamplerMaker, num_samples: int, batch_size: int, model: Any) -> "BatchSampler":
    sampler = make(num_samples, batch_size) if callable(make) else None
    if not is_ours(sampler):
        hint = "such as sampler=MercurySampler"
        raise invalid("sampler", make, "be a sampler class of flwr_hetero.sampler", hint)
    if model is not None:
        sampler = sampler.fed_by(model)
    if sampler.learns_from == "priority":
        hint = "hetero.batches(loader, msg, sampler=PGDSampler, model=model)"
        raise invalid("model", model, "be the model whose gradients the sampler uses", hint)
    return sampler


def attend(sampler: "BatchSampler", msg: Any, model: Any) -> None:
    """Keep a sampler and let it follow the message, unless the app has done so by hand."""
    handler = current_handler()
    message = msg if isinstance(msg, Message) else getattr(handler, "message", None)
    if handler is not None and handler.context is not None and id(sampler) not in handler.saves:
        keep(sampler, handler.context, _free_name(handler, sampler))
    if message is not None and (handler is None or id(sampler) not in handler.records):
        lead(sampler, message, model)


def _free_name(handler: Handler, sampler: "BatchSampler") -> str:
    """Return under which name a sampler is kept; one made anew for an epoch has the old name.

    What the one before has learnt is then saved first, so that the new one goes on from there.
    """
    kind = type(sampler).__name__
    kinds = handler.made.setdefault("kinds", [])
    if kind not in kinds:
        kinds.append(kind)
    elif handler.saves:
        for used in handler.used:
            used.settle()
        for save in handler.saves.values():
            save()
    return "sampler" if kinds[0] == kind else f"sampler-{kind}"
