"""Flower's arrays, read where they lie and written with a single copy.

``Array.numpy()`` and ``Array(values)`` copy each array two or three times, which costs the server
of a large model most of its time and memory.
"""

import io
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from flwr_hetero._flwr import NUMPY

BLOCK = 1 << 17
"""Numbers of an array that are computed at a time: intermediate values then stay in the cache."""
Read = Callable[[slice], NDArray[Any]]
"""Returns a part of an array as if this had one dimension; the part must not be changed."""


def view_array(array: Array) -> NDArray[Any]:
    """View an array without copying its payload and without pickle; it must not be changed."""
    if isinstance(array, MovedArray):
        return array.numpy()
    # Other versions are for structured types only.
    if array.data[6:7] != b"\1":
        raise ValueError("not an npy file of version 1")
    start = 10 + int.from_bytes(array.data[8:10], "little")
    shape, fortran, dtype = _parse_header(array.data[:start])
    if dtype.hasobject:
        raise ValueError("the array holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    flat = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return flat.reshape(shape, order="F" if fortran else "C")


# The same few headers come again and again.
@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    return np.lib.format.read_array_header_1_0(stream)


def array_of(values: NDArray[Any]) -> Array:
    """Return ``Array(values)``, byte for byte, but with a single copy.

    >>> array_of(np.eye(2)) == Array(np.eye(2))
    True
    """
    return Array(_name_of(values.dtype), values.shape, NUMPY, _npy(values))


# To write the name of a type takes as long as to add up 100,000 numbers.
_name_of = lru_cache(str)


def _npy(values: NDArray[Any]) -> bytes:
    """Return what ``np.save`` writes."""
    header = io.BytesIO()
    entries = np.lib.format.header_data_from_array_1_0(values)
    np.lib.format.write_array_header_1_0(header, entries)
    ordered = values.T if entries["fortran_order"] else values
    return b"".join((header.getvalue(), np.asarray(ordered, order="C").data))


def step_between(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    """Return the difference of two arrays, at least in single precision."""
    dtype = np.result_type(after, before, np.float32)
    return np.asarray(np.subtract(after, before, dtype=dtype))


class MovedArray(Array):
    r"""The array :math:`base + s \, (after - before)`, which is computed each time it is read.

    It needs no memory of its own, so the updates of many nodes can be moved before they are added
    up one after the other.
    """

    def __init__(self, base: Array, before: Array, after: Array, scale: float) -> None:
        # What a node writes beside its array, such as a type, may be wrong.
        own = after if isinstance(after, MovedArray) else view_array(after)
        dtype = _name_of(own.dtype) if np.dtype(own.dtype).kind == "f" else before.dtype
        # Flower's `__init__` and `__setattr__` are about bytes, which this array does not keep.
        vars(self).update(dtype=dtype, shape=tuple(before.shape), stype=NUMPY)
        vars(self).update(base=base, before=before, after=after, scale=scale)

    def numpy(self) -> NDArray[Any]:
        """Compute the array."""
        return self.reader()(slice(None)).reshape(self.shape)

    def reader(self) -> Read:
        """Return a function that computes a part of the array."""
        entries = vars(self)
        base, before, after = (reader_of(entries[name]) for name in ("base", "before", "after"))

        def read(part: slice) -> NDArray[Any]:
            step = step_between(before(part), after(part))
            step *= entries["scale"]
            start = base(part)
            fits = np.result_type(start, step) == step.dtype
            return np.asarray(np.add(start, step, out=step if fits else None), self.dtype)

        return read

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array as ``np.save`` writes it."""
        return _npy(self.numpy())


# --- in blocks -------------------------------------------------------------------------------
def reader_of(array: Array) -> Read:
    """Return a function that returns a part of an array."""
    if isinstance(array, MovedArray):
        return array.reader()
    return view_array(array).reshape(-1).__getitem__


def blocks_of(size: int) -> Iterator[slice]:
    """Divide so many numbers into parts of at most :data:`BLOCK`."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def mixed(old: NDArray[Any], new: NDArray[Any], part: float) -> NDArray[Any]:
    r"""Return :math:`(1 - p) \, old + p \, new`, of arrays of one shape, in the type of ``new``.

    >>> mixed(np.zeros(2), np.array([1.0, 2.0]), part=0.5)
    array([0.5, 1. ])
    """
    mean = np.empty(new.size, new.dtype)
    before = old.reshape(-1)
    after = new.reshape(-1)
    for block in blocks_of(mean.size):
        np.multiply(after[block], part, out=mean[block])
        mean[block] += (1 - part) * before[block]
    return mean.reshape(new.shape)
