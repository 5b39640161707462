"""Batches of a loader from a place on: of a DataLoader by their indices, else by passing over."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from flwr_hetero.client.steps.place import Place, Shape
from flwr_hetero.client.steps.stream import Stream, draw_seed
from flwr_hetero.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler


class Source(Protocol):
    """A loader whose passes can be entered anywhere."""

    shape: Shape
    generators: list[Any]

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give so many batches from a place on, each with the place after it."""


def source_of(loader: Iterable[Any]) -> "Source | None":
    """Make the source of a loader; None for an iterator, which has one pass only."""
    if isinstance(loader, Iterator):
        return None
    return DrawnSource(loader) if draws_indices(loader) else PassedSource(loader)


def draws_indices(loader: object) -> bool:
    """Return whether this is a torch DataLoader of data that are read by index."""
    data: Any = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        return False
    return not isinstance(loader.dataset, data.IterableDataset)


def is_ours(sampler: object) -> "TypeGuard[BatchSampler]":
    """Return whether this is a sampler of this package; a node without one needs no torch."""
    own: Any = sys.modules.get("flwr_hetero.client.batch_sampler")
    return own is not None and isinstance(sampler, own.BatchSampler)


def drawn_by(loader: Any, indices: Any, *, by_batch: bool = True) -> Any:
    """Return a copy of a DataLoader that takes its indices from elsewhere."""
    changed = copy(loader)
    # a DataLoader refuses to have these set
    changed.__dict__["batch_sampler" if by_batch else "sampler"] = indices
    changed.__dict__["_iterator"] = None
    if (base := changed.__dict__.get("base_dataloader")) is not None:  # accelerate's are around one
        changed.__dict__["base_dataloader"] = drawn_by(base, indices, by_batch=by_batch)
    return changed


def first_place(source: Source) -> Place:
    """Begin with a node's first pass."""
    return Place(draw_seed(source.generators))


class DrawnSource:
    """A DataLoader: its sampler draws the pass, and what is wanted of it is loaded.

    What is wanted, of several passes if need be, is loaded by a copy of the loader in one go. So
    workers load nothing ahead that will not be trained.
    """

    def __init__(self, loader: Any) -> None:
        by_batch = loader.batch_sampler is not None
        self._indices = loader.batch_sampler if by_batch else loader.sampler
        self._feed = Feed()
        self._loader = drawn_by(loader, self._feed, by_batch=by_batch)
        self._samplers = list(_samplers(self._indices))
        self.generators = _generators([loader, *self._samplers])
        self.shape = Shape(_length(loader.dataset), batch_size_of(loader))

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give so many batches from a place on, each with the place after it."""
        plan = list(islice(self._plan(place, count), count))
        self._feed.items = [indices for _, indices in plan]
        for batch, (after, _) in zip(self._loader, plan, strict=False):
            yield after, batch

    def _plan(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        while True:
            place, order = self._order(place, count)
            for indices in order:
                place = place.onward()
                yield place, indices
            if not place.position:
                raise empty_pass()
            place = place.next_pass()

    def _order(self, place: Place, count: int) -> tuple[Place, list[Any]]:
        """Return up to ``count`` entries of the pass; the place has the order if it is kept."""
        end = place.position + count
        if place.order is None:
            whole = 0 if self._is_repeatable() else _length(self._indices)
            for sampler in self._samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(place.number)
            with Stream(place.pass_seed, self.generators).used():
                order = list(islice(self._indices, max(end, whole)))
            if whole > 0:
                place = place._replace(order=tuple(order))
        else:
            order = list(place.order)
        return place, order[place.position : end]

    def _is_repeatable(self) -> bool:
        """Return whether the samplers are torch's, whose order follows from the seed."""
        return all(type(each).__module__.startswith("torch.") for each in self._samplers)


class Feed:
    """What a DataLoader takes its indices from."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class PassedSource:
    """Any other iterable: what was given before is passed over.

    What it draws at random comes from the pass's seed, so that its order is the same again.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.generators = _generators([loader])
        self.shape = Shape(_length(loader), batch_size_of(loader))

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give so many batches from a place on, each with the place after it."""
        given = 0
        while given < count:
            stream = Stream(place.pass_seed, self.generators)
            rest = islice(stream.iterate(self._loader), place.position, None)
            for batch in islice(rest, count - given):
                place, given = place.onward(), given + 1
                yield place, batch
            if given < count:
                if not place.position:
                    raise empty_pass()
                place = place.next_pass()


def empty_pass() -> ValueError:
    """Make the error for a loader that gives nothing."""
    hint = "pass the loader, not an iterator, and data that fill a batch"
    return invalid("loader", "a pass without one", "give a batch in every pass", hint)


def batch_size_of(loader: Any) -> int:
    """Return the examples of a loader's batches; -1 where that is unknown."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(owner, "batch_size", None), int):
            return size
    return -1


def _samplers(indices: Any) -> Iterator[Any]:
    """Give a sampler and those that it draws from."""
    seen: list[Any] = []
    while indices is not None and all(indices is not each for each in seen):
        seen.append(indices)
        indices = getattr(indices, "sampler", None)
    yield from seen


def _generators(owners: Iterable[Any]) -> list[Any]:
    """Return the torch generators that objects have as ``generator``, each once."""
    torch: Any = sys.modules.get("torch")
    found: list[Any] = []
    for owner in owners:
        own = getattr(owner, "generator", None)
        if torch and isinstance(own, torch.Generator) and all(own is not g for g in found):
            found.append(own)
    return found


def _length(sized: Any) -> int:
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(sized)
    return -1
