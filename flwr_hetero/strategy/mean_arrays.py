"""Weighted mean of ArrayRecords, read and written where they lie, each dtype kept."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.weighted_mean import weighted_mean
from flwr_hetero.strategy.reply_checks import view_array


def mean_arrays(
    records: Sequence[ArrayRecord], weights: ArrayLike, like: ArrayRecord
) -> ArrayRecord:
    """Average ArrayRecords without unpacking them: read and written where they lie.

    Parameters
    ----------
    records : sequence of ArrayRecord
        With the names and shapes of ``like``.
    weights : array_like of float, shape (num_records,)
        One per record.
    like : ArrayRecord
        Names, shapes and dtypes of the result.

    Returns
    -------
    ArrayRecord
        The weighted mean.

    Examples
    --------
    >>> one, four = (ArrayRecord({"w": Array(np.full(2, value))}) for value in (1.0, 4.0))
    >>> mean_arrays([one, four], weights=[2, 1], like=one)["w"].numpy()
    array([2., 2.])
    """
    mean = ArrayRecord()
    for name, array in like.items():
        dtype = np.dtype(array.dtype)
        views = [view_array(record[name]).astype(dtype, copy=False) for record in records]
        data = _mean_npy(views, weights, dtype)
        mean[name] = Array(str(dtype), tuple(views[0].shape), SType.NUMPY, data)
    return mean


def keep_dtypes(arrays: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """Bring arrays back to the dtypes of the global model; averaging makes floats of integers.

    Parameters
    ----------
    arrays : ArrayRecord
        Changed in place.
    like : ArrayRecord
        Names with the dtypes wanted.

    Returns
    -------
    ArrayRecord
        ``arrays``; integers are rounded.

    Examples
    --------
    >>> like = ArrayRecord({"count": Array(np.array(3))})
    >>> keep_dtypes(ArrayRecord({"count": Array(np.array(2.6))}), like)["count"].numpy()
    array(3)
    """
    for name, array in arrays.items():
        if name in like and array.dtype != like[name].dtype:
            dtype, values = np.dtype(like[name].dtype), array.numpy()
            whole = dtype.kind in "iub" and values.dtype.kind == "f"
            arrays[name] = Array(np.asarray(np.rint(values) if whole else values, dtype))
    return arrays


def _mean_npy(views: list[NDArray[Any]], weights: ArrayLike, dtype: np.dtype[Any]) -> bytes:
    """Write the mean straight into the bytes of an npy file, so that it exists only once."""
    stream, shape = io.BytesIO(), views[0].shape
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    start = stream.tell()
    if views[0].nbytes:
        stream.seek(start + views[0].nbytes - 1)
        stream.write(b"\0")
        with stream.getbuffer() as memory:
            out = np.frombuffer(memory, dtype, offset=start).reshape(shape)
            weighted_mean(views, weights, out=out)
            del out  # or the buffer could not be closed, and getvalue would copy it
    return stream.getvalue()
