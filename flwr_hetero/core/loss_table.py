"""The latest loss of every sample, and which are the highest."""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

Indices: TypeAlias = NDArray[np.int64]


def high_loss_samples(losses: ArrayLike, count: int) -> Indices:
    """Find the samples with the highest recorded losses (Algorithm 1, line 3).

    Parameters
    ----------
    losses : array_like of float, shape (num_samples,)
        Latest loss per sample; NaN where none is recorded yet.
    count : int
        How many.

    Returns
    -------
    ndarray of int64, shape (at most count,)
        Highest first, at ties the lower index; only samples with a recorded loss.

    Examples
    --------
    >>> high_loss_samples([0.1, 2.0, np.nan, 0.7], 2)
    array([1, 3])
    """
    loss = np.asarray(losses, dtype=np.float64)
    known = np.flatnonzero(~np.isnan(loss))
    count = min(count, known.size)
    if not count:
        return np.empty(0, np.int64)
    threshold = np.partition(loss[known], -count)[-count]
    candidates = known[loss[known] >= threshold]
    highest = np.argsort(-loss[candidates], kind="stable")[:count]
    return np.asarray(candidates[highest], dtype=np.int64)


def record_losses(table: NDArray[np.floating], indices: ArrayLike, losses: ArrayLike) -> None:
    """Write the losses of processed samples into a table (Algorithm 1, line 14).

    Parameters
    ----------
    table : ndarray of float, shape (num_samples,)
        Latest loss per sample; changed in place.
    indices : array_like of int, shape (n,)
        Samples in ``range(num_samples)``; of a sample named twice the last loss stays.
    losses : array_like of float, shape (n,)
        Finite.

    Raises
    ------
    ValueError
        If shapes differ, an index is out of range or a loss is not finite; the table is then
        unchanged.

    Examples
    --------
    >>> table = np.full(3, np.nan)
    >>> record_losses(table, [2, 0], [0.5, 1.5])
    >>> table
    array([1.5, nan, 0.5])
    """
    index, loss = np.asarray(indices), np.asarray(losses, dtype=np.float64)
    if (
        index.ndim != 1
        or index.shape != loss.shape
        or (index.size and index.dtype.kind not in "iu")
    ):
        cure = "pass integer positions, one loss each"
        raise invalid("indices", f"{index.dtype} {index.shape}", "be integers, one per loss", cure)
    if index.size and (index.min() < 0 or index.max() >= table.size):
        span = (int(index.min()), int(index.max()))
        raise invalid("indices", span, f"lie in range({table.size})", "send what was handed out")
    if not np.isfinite(loss).all():
        raise invalid("losses", loss.tolist()[:3], "be finite", "lower the learning rate")
    table[index.astype(np.int64)] = loss


def check_loss_table(losses: ArrayLike) -> int:
    """Refuse an empty or misshapen loss table; return its length.

    Examples
    --------
    >>> check_loss_table([])
    Traceback (most recent call last):
    ...
    ValueError: losses must be a 1-D table with at least one sample, got shape (0,): ...
    """
    shape = np.shape(losses)
    if len(shape) != 1 or shape[0] == 0:
        rule = "be a 1-D table with at least one sample"
        raise ValueError(f"losses must {rule}, got shape {shape}: pass one entry per sample.")
    return int(shape[0])
