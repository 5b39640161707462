"""Signs, orders and vectors as bytes, for the records that nodes and order server exchange."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.orders import Signs, checked_order

DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
"""Types of vectors on the wire."""


class Packed(NamedTuple):
    """Vectors on the wire.

    Parameters
    ----------
    data : bytes
        Rows one after the other, little-endian.
    scale : float
        What to multiply them by.
    """

    data: bytes
    scale: float


def pack_vectors(vectors: ArrayLike, dtype: str = "float16") -> Packed:
    """Write vectors; half precision gets a common scale so that small gradients survive it.

    Parameters
    ----------
    vectors : array_like of float, shape (num_vectors, dim)
        Finite.
    dtype : {"float16", "float32", "float64"}
        Type on the wire.

    Returns
    -------
    Packed
        For :func:`unpack_vectors`.

    Examples
    --------
    >>> packed = pack_vectors([[2e-9, -1e-9]])
    >>> len(packed.data), unpack_vectors(*packed, dim=2)
    (4, array([[ 2.e-09, -1.e-09]], dtype=float32))
    """
    values = np.asarray(vectors)
    largest = float(np.abs(values).max(initial=0.0)) if dtype == "float16" else 1.0
    scale = largest or 1.0
    return Packed((values / values.dtype.type(scale)).astype(DTYPES[dtype]).tobytes(), scale)


def unpack_vectors(
    data: bytes, scale: float, *, dim: int, dtype: str = "float16"
) -> NDArray[np.floating]:
    """Read vectors that a node sent.

    Parameters
    ----------
    data : bytes
        From :func:`pack_vectors`.
    scale : float
        Likewise.
    dim : int
        Length of each vector.
    dtype : str
        Type on the wire.

    Returns
    -------
    ndarray of float32, or of float64 if sent so, shape (num_vectors, dim)
        The vectors.

    Raises
    ------
    ValueError
        If the type is unknown, the bytes are not whole vectors, or a value is not finite.

    Examples
    --------
    >>> unpack_vectors(b"123", 1.0, dim=4)
    Traceback (most recent call last):
    ...
    ValueError: vectors must be whole rows of 4 float16, got 3 bytes: ...
    """
    if dtype not in DTYPES:
        raise invalid("dtype", dtype, f"be one of {list(DTYPES)}", "use pack_vectors")
    row = dim * np.dtype(DTYPES[dtype]).itemsize
    if dim < 1 or len(data) % row:
        rule = f"be whole rows of {dim} {dtype}, got {len(data)} bytes"
        raise ValueError(f"vectors must {rule}: the sketch sizes of server and node differ.")
    raw = np.frombuffer(data, DTYPES[dtype]).reshape(-1, dim)
    values: NDArray[np.floating] = raw.astype("f8" if dtype == "float64" else "f4")
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scale
    if not (scale > 0 and np.isfinite(values).all()):
        raise ValueError("vectors must be finite: the node's training has diverged.")
    return values


def pack_signs(signs: ArrayLike) -> bytes:
    """Write signs as bits.

    Parameters
    ----------
    signs : array_like of int, shape (num_pairs,)
        +1 or -1.

    Returns
    -------
    bytes
        Eight signs a byte.

    Examples
    --------
    >>> unpack_signs(pack_signs([1, -1, -1]), 3)
    array([ 1, -1, -1], dtype=int8)
    """
    return np.packbits(np.asarray(signs) > 0).tobytes()


def unpack_signs(data: bytes, num_pairs: int) -> Signs:
    """Read signs.

    Parameters
    ----------
    data : bytes
        From :func:`pack_signs`.
    num_pairs : int
        How many.

    Returns
    -------
    ndarray of int8, shape (num_pairs,)
        +1 or -1.

    Raises
    ------
    ValueError
        If there are more or fewer bytes than that takes.
    """
    if len(data) != -(-num_pairs // 8):
        rule = f"be {-(-num_pairs // 8)} bytes for {num_pairs} pairs"
        raise invalid("signs", f"{len(data)} bytes", rule, "number the units alike")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=num_pairs)
    return 2 * bits.view(np.int8) - 1


def pack_order(order: ArrayLike) -> bytes:
    """Write a whole order.

    Parameters
    ----------
    order : array_like of int, shape (num_units,)
        A permutation.

    Returns
    -------
    bytes
        Little-endian int32.

    Examples
    --------
    >>> unpack_order(pack_order([2, 0, 1]), 3)
    array([2, 0, 1])
    """
    return np.asarray(order, "<i4").tobytes()


def unpack_order(data: bytes, num_units: int) -> NDArray[np.int64]:
    """Read a whole order.

    Parameters
    ----------
    data : bytes
        From :func:`pack_order`.
    num_units : int
        Its length.

    Returns
    -------
    ndarray of int64, shape (num_units,)
        The order.

    Raises
    ------
    ValueError
        If it is no permutation of that length.
    """
    if len(data) != 4 * num_units:
        rule = f"be {4 * num_units} bytes for {num_units} units"
        raise invalid("order", f"{len(data)} bytes", rule, "number the units alike")
    return checked_order(np.frombuffer(data, "<i4"))
