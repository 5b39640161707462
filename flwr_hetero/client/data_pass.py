"""A node's pass over its data: it goes on from message to message, whatever the loader."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from flwr_hetero.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.client.batch_sampler import BatchSampler


class Place(NamedTuple):
    """Where a node is: batches given of the pass with this number; sizes are -1 if unknown."""

    size: int
    batch_size: int
    seed: int
    number: int = 0
    position: int = 0

    @property
    def pass_seed(self) -> int:
        """Seed of this pass: each has another, and the same one in each message."""
        return int(np.random.SeedSequence([self.seed, self.number]).generate_state(1)[0])


class Stream:
    """A seeded run of the global generators, and of a loader's own, that goes on at each use."""

    def __init__(self, seed: int, generators: Iterable[Any] = ()) -> None:
        torch: Any = sys.modules.get("torch")
        self._own = [*generators, *([torch.default_generator] if torch else [])]
        own = [torch.Generator().manual_seed(seed).get_state() for _ in self._own]
        self._states, self._numpy = (random.Random(seed).getstate(), own), np.random.MT19937(seed)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from this stream within."""
        before = self._swap(self._states)
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            # the next use goes on here; what the user seeded is as if nothing had been drawn
            self._states = self._swap(before)
            np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]

    def _swap(self, states: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        """Put states into the generators; return those that they had."""
        before = random.getstate(), [generator.get_state() for generator in self._own]
        random.setstate(states[0])
        for generator, state in zip(self._own, states[1], strict=True):
            generator.set_state(state)
        return before

    def iterate(self, source: Iterable[Any]) -> Iterator[Any]:
        """Give what a source gives; what it draws for that comes from this stream."""
        with self.used():
            items = iter(source)
        while True:
            with self.used():
                found = list(islice(items, 1))
            if not found:
                return
            yield found[0]


class Passes:
    """Passes over any iterable: each is entered by passing over what was given before."""

    num_examples = 0
    """Examples of the data; 0 if unknown."""

    def __init__(self, loader: Any, data: Any, drawing: Iterable[Any]) -> None:
        self.size, self.batch_size = length_of(data), batch_size_of(loader)
        self._loader, torch = loader, sys.modules.get("torch")
        own = (getattr(each, "generator", None) for each in drawing)
        kind = torch.Generator if torch else ()
        self._generators = [generator for generator in own if isinstance(generator, kind)]

    def first_place(self) -> Place:
        """Begin a node's first pass, with a seed that is drawn as a DataLoader draws one."""
        if (torch := sys.modules.get("torch")) is None:
            seed = np.random.randint(2**31 - 1)  # noqa: NPY002 (the one that users seed)
        else:
            own = self._generators[0] if self._generators else None
            seed = torch.randint(2**31 - 1, (), generator=own)
        return Place(self.size, self.batch_size, int(seed))

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give so many batches, of several passes if need be, each with the place after it."""
        while count:
            for batch in islice(self.rest(place, count), count):
                place, count = place._replace(position=place.position + 1), count - 1
                yield place, batch
            if count and not place.position:
                raise empty_pass()
            if count:
                place = place._replace(number=place.number + 1, position=0)

    def rest(self, place: Place, count: int) -> Iterable[Any]:
        """Return the rest of a pass, of which ``count`` batches are wanted."""
        # what a pass draws at random comes from its seed: its order is the same again
        whole = Stream(place.pass_seed, self._generators).iterate(self._loader)
        return islice(whole, place.position, None)


class IndexPasses(Passes):
    """Passes over a DataLoader: its sampler draws them, and only what is wanted is loaded."""

    def __init__(self, loader: Any) -> None:
        by_batch = loader.batch_sampler is not None
        self._indices = loader.batch_sampler if by_batch else loader.sampler
        # a batch sampler draws from a sampler, which may draw from another
        self._samplers, inner = list[Any](), self._indices
        while inner is not None:
            self._samplers.append(inner)
            inner = getattr(inner, "sampler", None)
        super().__init__(loader, loader.dataset, [loader, *self._samplers])
        self.num_examples = max(0, self.size)
        self._wanted = list[Any]()
        self._loader = drawn_by(loader, self._wanted, by_batch=by_batch)

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give so many batches, of several passes if need be, each with the place after it."""
        # loaded in one go: workers load nothing ahead that will not be trained
        plan = list(super().take(place, count))
        self._wanted[:] = [indices for _, indices in plan]
        for batch, (after, _) in zip(self._loader, plan, strict=False):
            yield after, batch

    def rest(self, place: Place, count: int) -> Iterable[Any]:
        """Return the indices of the batches that are wanted of a pass."""
        # one for several processes gives the same order until it gets the epoch
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(place.number)
        with Stream(place.pass_seed, self._generators).used():
            return list(islice(self._indices, place.position, place.position + count))


@dataclass(eq=False)
class LoaderPass:
    """A pass over a loader in this message."""

    loader: Any
    asked: int | None
    """Batches that it gives; None: those of the loader's own pass."""
    full: int
    """Batches of the loader's own pass; -1 if unknown."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where all loaders were before it."""
    leader: "LoaderPass | None" = None
    """The pass beside which it runs, as in ``zip``."""
    beside: "list[LoaderPass]" = field(default_factory=list)
    given: int = 0
    given_alone: int = 0
    """Batches given before the first pass beside it began."""
    examples: int = 0
    optimizer_steps: int = 0
    """Steps of optimizers since it began, until the next one begins."""
    is_open: bool = True
    has_ended: bool = False
    """Whether it gave all that it had to give."""
    step_s: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Batches that it gave: one of each loader side by side is one step."""
        # A pass that gave no more since another one began was only a look at a batch.
        others = [] if self.given > self.given_alone else [each.given for each in self.beside]
        return max([self.given, *others])

    @property
    def is_complete(self) -> bool:
        """Whether it gave all, also if the loop broke off after the last batch."""
        most = self.full if self.asked is None else self.asked
        return self.has_ended or 0 < most <= self.steps


@dataclass
class OptimizerSteps:
    """The steps of an optimizer in this message, and after how many batches it took them."""

    count: int = 0
    last: int = 0
    gaps: list[int] = field(default_factory=list)
    after_end: int = 0
    """Steps since the last pass has ended."""


def passes_of(loader: Iterable[Any]) -> Passes | None:
    """Make the passes over a loader; None for an iterator, which has one only."""
    if isinstance(loader, Iterator):
        return None
    return IndexPasses(loader) if draws_indices(loader) else Passes(loader, loader, [loader])


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
    # accelerate's are around one
    if (base := changed.__dict__.get("base_dataloader")) is not None:
        changed.__dict__["base_dataloader"] = drawn_by(base, indices, by_batch=by_batch)
    return changed


def plain_pass(loader: Any) -> Any:
    """Return what gives a loader's own pass: in order, where a sampler of ours draws its batches.

    Such a sampler gives some examples more often than others, and counts what it gives.
    """
    if not is_ours(sampler := getattr(loader, "batch_sampler", None)):
        return loader
    numbers = range(sampler.num_samples)
    starts = range(0, sampler.num_samples, sampler.batch_size)
    return drawn_by(loader, [list(numbers[i : i + sampler.batch_size]) for i in starts])


def empty_pass() -> ValueError:
    """Make the error for a loader that gives nothing."""
    hint = "pass the loader, not an iterator, and data that fill a batch"
    return invalid("loader", "a pass without one", "give a batch in every pass", hint)


def batch_size_of(loader: Any) -> int:
    """Return the examples of a loader's batches; -1 where that is unknown."""
    owners = loader, getattr(loader, "batch_sampler", None)
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return next((size for size in sizes if isinstance(size, int)), -1)


def length_of(sized: Any) -> int:
    """Return a length; -1 where there is none."""
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(sized)
    return -1
