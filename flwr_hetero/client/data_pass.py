"""A node's pass over its data, which continues from message to message with any loader."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from flwr_hetero.errors import invalid


class Place(NamedTuple):
    """The pass that a node is in, and the batches given of it; sizes are -1 if unknown."""

    size: int
    batch_size: int
    seed: int
    number: int = 0
    position: int = 0

    @property
    def pass_seed(self) -> int:
        """Seed of this pass: a different one for each pass, the same one in each message."""
        return int(np.random.SeedSequence([self.seed, self.number]).generate_state(1)[0])


# The constants by which SeedSequence turns its pool of four words into those of a state.
FACTORS = np.cumprod([0x8B51F9DD, *[0x58F38DED] * 624], dtype=np.uint32)


class SeedWords(ISeedSequence):
    """The words of NumPy's SeedSequence for MT19937, in a fifth of the time."""

    def __init__(self, seed: int) -> None:
        self._pool = np.random.SeedSequence(seed).pool

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Return the 624 words of the state of a Mersenne Twister."""
        words = (FACTORS[:-1].reshape(-1, 4) ^ self._pool) * FACTORS[1:].reshape(-1, 4)
        words ^= words >> np.uint32(16)
        # NumPy reads the items of a list faster than those of an array.
        return words.ravel()[:n_words].tolist()


class GlobalGenerators:
    """Python's, NumPy's and torch's global random generators, and a loader's own."""

    def __init__(self, loaders: Iterable[Any] = ()) -> None:
        torch: Any = sys.modules.get("torch")
        self._torch = list(loaders)
        if torch is not None:
            self._torch.append(torch.default_generator)

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        random.seed(seed)
        bit_generator = np.random.MT19937(SeedWords(seed))  # type: ignore[arg-type]
        np.random.set_bit_generator(bit_generator)  # type: ignore[attr-defined]
        for generator in self._torch:
            generator.manual_seed(seed)

    def states(self) -> tuple[Any, Any, list[Any]]:
        """Return the states that they have; of NumPy's it is the generator itself."""
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return random.getstate(), numpy, [generator.get_state() for generator in self._torch]

    def set_states(self, states: tuple[Any, Any, list[Any]]) -> None:
        """Put states into them."""
        python, numpy, others = states
        random.setstate(python)
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        for generator, state in zip(self._torch, others, strict=True):
            generator.set_state(state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give them back, after the block, the states that they had before."""
        before = self.states()
        try:
            yield
        finally:
            self.set_states(before)


def iterate(source: Iterable[Any], seed: int, generators: GlobalGenerators) -> Iterator[Any]:
    """Give the items of a source, whose random draws come from a seeded run of the generators."""
    with generators.restored():
        generators.seed(seed)
        items = iter(source)
        states = generators.states()
    while True:
        with generators.restored():
            generators.set_states(states)
            item = list(islice(items, 1))
            states = generators.states()
        if not item:
            return
        yield item[0]


class Passes:
    """Passes over a loader, which continue where the last message ended if they keep a place.

    A pass is entered by passing over what was given before. Of a DataLoader whose data are read by
    index, only the indices are passed over. No place is kept without a mod, of an iterator, which
    has one pass only, and with a sampler of this package, which keeps its place itself.
    """

    def __init__(self, loader: Any, *, has_mod: bool) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if is_ours(sampler) else None
        self.keeps_place = has_mod and self._sampler is None and not isinstance(loader, Iterator)
        self._by_index = self.keeps_place and draws_indices(loader)
        self._loader = loader
        self._source: Iterable[Any] = loader
        self.size = length_of(loader)
        self.batch_size = batch_size_of(loader)
        self.num_examples = 0 if self._sampler is None else self._sampler.num_samples
        self._wanted: list[Any] = []
        # A batch sampler draws from a sampler, which may draw from another one.
        self._samplers: list[Any] = []
        if self._by_index:
            by_batch = sampler is not None
            inner: Any = sampler if by_batch else loader.sampler
            self._source = inner
            while inner is not None:
                self._samplers.append(inner)
                inner = getattr(inner, "sampler", None)
            self.size = length_of(loader.dataset)
            self.num_examples = max(0, self.size)
            self._loader = drawn_by(loader, self._wanted, by_batch=by_batch)
        torch: Any = sys.modules.get("torch")
        owners = [getattr(owner, "generator", None) for owner in [loader, *self._samplers]]
        kind = () if torch is None else torch.Generator
        self._generators = [generator for generator in owners if isinstance(generator, kind)]

    def first_place(self) -> Place:
        """Begin a node's first pass, with a seed that is drawn as a DataLoader draws one."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            # The generator that users seed.
            seed = np.random.randint(2**31 - 1)  # noqa: NPY002
        else:
            generator = self._generators[0] if self._generators else None
            seed = torch.randint(2**31 - 1, (), generator=generator)
        return Place(self.size, self.batch_size, int(seed))

    def take(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give ``count`` batches, of several passes if need be, each with the place after it."""
        if not self._by_index:
            yield from self._items(place, count)
        else:
            # All are loaded in one go, so that workers load nothing ahead that is not trained.
            plan = list(self._items(place, count))
            self._wanted[:] = [indices for _, indices in plan]
            for batch, (after, _) in zip(self._loader, plan, strict=False):
                yield after, batch
        if self._sampler is not None:
            # Workers have drawn ahead, and may end only after the next pass has begun.
            self._sampler.settle()

    def _items(self, place: Place, count: int) -> Iterator[tuple[Place, Any]]:
        """Give ``count`` batches, or their indices, each with the place after it."""
        while True:
            for item in islice(self._rest(place, count), count):
                place = place._replace(position=place.position + 1)
                count -= 1
                yield place, item
            if not count:
                return
            if not place.position:
                hint = "pass the loader, not an iterator, and data that fill a batch"
                rule = "give a batch in every pass"
                raise invalid("loader", "a pass without one", rule, hint)
            place = place._replace(number=place.number + 1, position=0)

    def _rest(self, place: Place, count: int) -> Iterable[Any]:
        """Return the rest of a pass, of which ``count`` batches are wanted."""
        if not self.keeps_place:
            if self._sampler is not None and place.number:
                # The last batch may be in use when the next one is drawn.
                self._sampler.continues = True
            return self._source
        # All random draws of a pass come from its seed, so its order is the same in each message.
        generators = GlobalGenerators(self._generators)
        if not self._by_index:
            items = iterate(self._source, place.pass_seed, generators)
            return islice(items, place.position, None)
        # A distributed sampler repeats its order until it is given the epoch.
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(place.number)
        with generators.restored():
            generators.seed(place.pass_seed)
            return list(islice(self._source, place.position, place.position + count))


@dataclass(eq=False)
class LoaderPass:
    """A pass over a loader in this message."""

    loader: int  # number of the loader in this message
    asked: int | None  # batches that it gives; None: those of the loader's own pass
    full: int  # batches of the loader's own pass; -1 if unknown
    sizes: tuple[int, int] | None = None  # of the data and of batches, if places are kept by them
    places: Mapping[str, Place] = field(default_factory=dict)  # of all loaders, before it
    leader: "LoaderPass | None" = None  # the pass beside which it runs, as in zip()
    beside: "list[LoaderPass]" = field(default_factory=list)
    given: int = 0
    given_alone: int = 0  # batches given before the first pass beside it began
    examples: int = 0
    optimizer_steps: int = 0  # from its beginning to that of the next pass
    is_open: bool = True
    has_ended: bool = False  # whether it gave all that it had to give
    step_s: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Batches that it gave; batches of loaders side by side are one step."""
        # A pass that gave no more batches once another one began was only a look at its data.
        if self.given > self.given_alone:
            return self.given
        return max([self.given, *(other.given for other in self.beside)])

    @property
    def is_complete(self) -> bool:
        """Whether it gave all, even if the loop broke off after the last batch."""
        most = self.full if self.asked is None else self.asked
        return self.has_ended or 0 < most <= self.steps

    def num_equal_before(self) -> int:
        """Return how many loaders of equal sizes run beside this pass and began before it."""
        if self.leader is None:
            return 0
        before = [self.leader, *self.leader.beside[: self.leader.beside.index(self)]]
        others = [other for other in before if other.loader != self.loader]
        return sum(other.sizes == self.sizes for other in others)


@dataclass
class OptimizerSteps:
    """The steps of an optimizer in this message, and after how many batches it took them."""

    count: int = 0
    last: int = 0
    gaps: list[int] = field(default_factory=list)
    after_end: int = 0  # steps since the last pass has ended


def draws_indices(loader: object) -> bool:
    """Return whether this is a torch DataLoader of data that are read by index."""
    data: Any = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        return False
    return not isinstance(loader.dataset, data.IterableDataset)


def is_ours(sampler: object) -> TypeGuard[Any]:
    """Return whether this is a sampler of this package; a node without one needs no torch."""
    module: Any = sys.modules.get("flwr_hetero.client.batch_sampler")
    return module is not None and isinstance(sampler, module.BatchSampler)


def drawn_by(loader: Any, indices: Any, *, by_batch: bool = True) -> Any:
    """Return a copy of a DataLoader that takes its indices from elsewhere."""
    changed = copy(loader)
    # A DataLoader refuses assignments to these attributes.
    changed.__dict__["batch_sampler" if by_batch else "sampler"] = indices
    changed.__dict__["_iterator"] = None
    # A loader of accelerate wraps another one.
    base = changed.__dict__.get("base_dataloader")
    if base is not None:
        changed.__dict__["base_dataloader"] = drawn_by(base, indices, by_batch=by_batch)
    return changed


def plain_pass(loader: Any) -> Any:
    """Return what gives a loader's own pass: in order if a sampler of ours draws its batches.

    Such a sampler gives some examples more often than others, and counts what it gives.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not is_ours(sampler):
        return loader
    numbers = range(sampler.num_samples)
    starts = range(0, sampler.num_samples, sampler.batch_size)
    return drawn_by(loader, [list(numbers[i : i + sampler.batch_size]) for i in starts])


def batch_size_of(loader: Any) -> int:
    """Return the number of examples in a loader's batches; -1 if it is unknown."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return -1


def length_of(sized: Any) -> int:
    """Return a length; -1 if there is none."""
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(sized)
    return -1


def batch_length(batch: Any) -> int | None:
    """Return the length of the first tensor or array in a batch; None if it has none."""
    shape = getattr(batch, "shape", None)
    if shape:
        return int(shape[0])
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        for part in batch:
            length = batch_length(part)
            if length is not None:
                return length
    return None
