"""Flower's arrays, read where they lie and written with a single copy.

``Array.numpy()`` and ``Array(values)`` copy each array two or three times, which costs the server
of a large model most of its time and memory.
"""

import io
import math
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from flwr_hetero._flwr import NUMPY


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
    return Array(str(values.dtype), values.shape, NUMPY, _npy(values))


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
        is_float = np.dtype(after.dtype).kind == "f"
        dtype = after.dtype if is_float else before.dtype
        # Flower's `__init__` and `__setattr__` are about bytes, which this array does not keep.
        vars(self).update(dtype=dtype, shape=tuple(after.shape), stype=NUMPY)
        vars(self).update(base=base, before=before, after=after, scale=scale)

    def numpy(self) -> NDArray[Any]:
        """Compute the array."""
        entries = vars(self)
        base = view_array(entries["base"])
        step = step_between(view_array(entries["before"]), view_array(entries["after"]))
        step *= entries["scale"]
        step = np.add(base, step, out=step if np.result_type(base, step) == step.dtype else None)
        return np.asarray(step, self.dtype)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array as ``np.save`` writes it."""
        return _npy(self.numpy())
