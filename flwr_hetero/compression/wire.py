"""Packed arrays in Flower's records: which arrays are packed, and how they are read and checked."""

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY
from flwr_hetero.compression import algorithm
from flwr_hetero.compression.algorithm import BITS
from flwr_hetero.records import BUFFERS, array_of, view_array

LEAST = 256
"""Values below which an array is sent as it is: a scale and few values, with much to lose."""
FLOATS = ("float16", "float32", "float64")
STYPES = {keys.PACKED + str(bits): bits for bits in BITS}
"""Serialisation of packed arrays, and their bits."""


def is_packable(name: str, array: Array) -> bool:
    """Return whether an array is worth packing, and bears it: variances must not become negative.

    >>> is_packable("weight", Array(np.zeros(256))), is_packable("weight", Array(np.zeros(255)))
    (True, False)
    """
    is_float = array.stype == NUMPY and array.dtype in FLOATS
    return is_float and math.prod(array.shape) >= LEAST and not name.endswith(BUFFERS)


def pack(like: Array, values: NDArray[np.floating], bits: int, *, no_longer: bool = False) -> Array:
    """Pack values for an array; ValueError if they are not finite."""
    data = algorithm.encode(values, bits, no_longer=no_longer)
    return Array(like.dtype, tuple(like.shape), f"{keys.PACKED}{bits}", data)


def unpack(array: Array, like: Array) -> NDArray[np.float32]:
    """Read a packed array, in the shape of another one; ValueError if it cannot be."""
    shape = tuple(like.shape)
    return algorithm.decode(array.data, math.prod(shape), STYPES[array.stype]).reshape(shape)


def packed(arrays: ArrayRecord, bits: int) -> ArrayRecord:
    """Pack a model (l. 1)."""
    written = arrays.copy()
    for name, array in arrays.items():
        if is_packable(name, array):
            # l. 1: q(w)
            written[name] = pack(array, view_array(array), bits)
    return written


def unpacked(arrays: ArrayRecord) -> ArrayRecord:
    """Read a model that may be packed (l. 2)."""
    read = arrays.copy()
    for name, array in arrays.items():
        if array.stype in STYPES:
            # l. 2: v
            read[name] = array_of(np.asarray(unpack(array, array), array.dtype))
    return read


def restored(arrays: ArrayRecord, sent: Mapping[str, Array], bits: int | None) -> ArrayRecord:
    """Add packed updates to the model that was sent (l. 5); ValueError if one cannot be read."""
    whole = arrays.copy()
    for name, array in arrays.items():
        if array.stype not in STYPES:
            continue
        # What was not asked for might be larger than what was.
        if name not in sent or not is_packable(name, sent[name]) or STYPES[array.stype] != bits:
            raise ValueError(f"array {name!r} is packed, which it should not be so")
        try:
            update = unpack(array, sent[name])
            start = view_array(sent[name])
        except ValueError as error:
            raise ValueError(f"packed array {name!r} {error}") from error
        with np.errstate(over="ignore"):
            # l. 5: w_i <- w + q(u)
            whole[name] = array_of(np.asarray(start + update, start.dtype))
    return whole
