"""Random numbers of a pass's own, for loaders that draw from the global generators."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Stream:
    """A seeded run of the global generators, and of a loader's own, that goes on at each use.

    What the user seeded is put back after each use, as if nothing had been drawn.

    Parameters
    ----------
    seed : int
        Seed of the numbers drawn within.
    generators : iterable of torch.Generator
        The loader's own generators, which are seeded as well.
    """

    def __init__(self, seed: int, generators: Iterable[Any] = ()) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._own = list(generators)
        if self._torch:
            self._own.append(self._torch.default_generator)
        self._numpy = np.random.MT19937(seed)
        self._python = random.Random(seed).getstate()
        self._states: list[Any] | None = None
        self._seed = seed

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from this stream within."""
        python = random.getstate()
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        before = [own.get_state() for own in self._own]
        self._enter()
        try:
            yield
        finally:
            self._python, self._states = random.getstate(), [own.get_state() for own in self._own]
            random.setstate(python)
            np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
            for own, state in zip(self._own, before, strict=True):
                own.set_state(state)

    def _enter(self) -> None:
        random.setstate(self._python)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        for number, own in enumerate(self._own):
            if self._states is None:
                own.manual_seed(self._seed)
            else:
                own.set_state(self._states[number])

    def iterate(self, source: Iterable[Any]) -> Iterator[Any]:
        """Give what a source gives; what it draws for that comes from this stream."""
        with self.used():
            items = iter(source)
        while True:
            with self.used():
                item = next(items, _END)
            if item is _END:
                return
            yield item


_END = object()


def draw_seed(generators: Iterable[Any] = ()) -> int:
    """Draw a seed as a DataLoader does: from its own generator, else from a global one."""
    own = next(iter(generators), None)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return int(np.random.randint(2**31 - 1))  # noqa: NPY002 (the one that users seed)
    generator = own if own is not None and own.device.type == "cpu" else None
    return int(torch.randint(2**31 - 1, (), generator=generator))
