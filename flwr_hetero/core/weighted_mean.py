"""Weighted mean of equally shaped arrays, in place and in their own precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

CHUNK = 65_536
"""Elements per pass: small enough that the running sum stays in the processor's cache."""


def normalised(weights: ArrayLike) -> NDArray[np.float64]:
    """Scale weights so that they sum to 1.

    Parameters
    ----------
    weights : array_like of float, shape (num_nodes,)
        At least 0 and finite.

    Returns
    -------
    ndarray of float64, shape (num_nodes,)
        Non-negative, with sum 1.

    Raises
    ------
    ValueError
        If a weight is negative or not finite, or all are 0.

    Examples
    --------
    >>> normalised([32, 16, 16])
    array([0.5 , 0.25, 0.25])
    """
    share = np.asarray(weights, dtype=np.float64)
    if share.ndim != 1 or not np.isfinite(share).all() or np.any(share < 0):
        raise invalid("weights", share.tolist(), "be finite and at least 0", "drop that node")
    if not share.sum() > 0:
        raise invalid("weights", share.tolist(), "have a positive sum", "average only real replies")
    return np.asarray(share / share.sum())


def weighted_mean(
    arrays: Sequence[NDArray[Any]],
    weights: ArrayLike,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    r"""Average arrays of several nodes (Eq. 4).

    .. math:: x = \sum_i \frac{w_i}{\sum_k w_k} x_i

    Parameters
    ----------
    arrays : sequence of ndarray, each of shape (...)
        One per node, all of one shape and dtype; only read. C-contiguous ones are not copied.
    weights : array_like of float, shape (num_nodes,)
        Weight per node, for instance its steps tau_i.
    out : ndarray of shape (...), optional
        C-contiguous array of the same dtype to write to.

    Returns
    -------
    ndarray of shape (...)
        The mean, in the arrays' own dtype: integers are rounded, booleans go with the majority.

    Raises
    ------
    ValueError
        If shapes or dtypes differ, or the weights are not fit for a mean.

    Notes
    -----
    Beside the result this needs two scratch buffers of ``CHUNK`` elements. All nodes are
    added up chunk by chunk, so that every input is read from memory once and nothing of its
    size is written but the result. Half precision is added up in single, integers in double.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.3.

    Examples
    --------
    >>> fast, slow = np.array([4.0, 0.0], np.float32), np.array([0.0, 8.0], np.float32)
    >>> weighted_mean([fast, slow], weights=[3, 1])
    array([3., 2.], dtype=float32)
    >>> weighted_mean([np.array([32]), np.array([1])], weights=[32, 1])
    array([31])
    """
    share = normalised(weights)
    if len(arrays) != len(share):
        raise invalid("arrays", len(arrays), f"be {len(share)}, one per weight", "pass one each")
    shape, dtype = arrays[0].shape, arrays[0].dtype.newbyteorder("=")
    for array in arrays:
        if array.shape != shape or array.dtype.newbyteorder("=") != dtype:
            described = f"{array.dtype} {array.shape}"
            raise invalid("arrays", described, f"all be {dtype} {shape}", "drop that node")
    mean = np.empty(shape, dtype) if out is None else out
    if mean.shape != shape or mean.dtype != dtype or not mean.flags.c_contiguous:
        rule = f"be a C-contiguous {dtype} array of shape {shape}"
        raise invalid("out", f"{mean.dtype} {mean.shape}", rule, "leave it out")
    _sum_up([array.reshape(-1) for array in arrays], share, mean.reshape(-1))
    return mean


def _sum_up(flat: Sequence[NDArray[Any]], share: NDArray[np.float64], mean: NDArray[Any]) -> None:
    """Write the weighted sum of 1-D arrays, chunk by chunk."""
    factors = share.astype(_sum_dtype(mean.dtype))
    total = np.empty(min(CHUNK, mean.size), factors.dtype)
    term = np.empty_like(total)
    for start in range(0, mean.size, CHUNK):
        part = slice(start, min(start + CHUNK, mean.size))
        here = slice(0, part.stop - start)
        np.multiply(flat[0][part], factors[0], out=total[here])
        for array, factor in zip(flat[1:], factors[1:], strict=True):
            np.multiply(array[part], factor, out=term[here])
            np.add(total[here], term[here], out=total[here])
        mean[part] = _as_dtype(total[here], mean.dtype)


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind in "fc":
        return np.promote_types(dtype, np.float32)
    return np.dtype(np.float64)


def _as_dtype(total: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "b":
        return total >= 0.5
    return np.rint(total) if dtype.kind in "iu" else total
