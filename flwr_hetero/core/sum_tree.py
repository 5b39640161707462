"""Draw from a large, changing discrete distribution without touching all of it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

FANOUT = 64
"""Values in a row; a level holds the sums of the rows below it."""
TOP = 4096
"""Longest list of sums that is searched as a whole, once for all points."""


class SumTree:
    """Non-negative values with their partial sums, kept current where values change.

    Setting or drawing b of n values costs ``b * FANOUT * log(n, FANOUT)`` operations plus
    ``TOP``; only building the tree costs n. Sums are recomputed from the values below and never
    carried along, so equal values give equal sums bit for bit, whatever the history.

    Parameters
    ----------
    values : array_like of float, shape (n,)
        Finite and not negative; a copy is kept as float64.

    Attributes
    ----------
    total : float
        Sum of all values.

    Raises
    ------
    ValueError
        If there is no value, or one is negative or not finite.

    Examples
    --------
    >>> tree = SumTree([1.0, 0.0, 3.0])
    >>> tree.total
    4.0
    >>> tree.find(np.array([0.0, 0.24, 0.26, 0.99]))
    array([0, 0, 2, 2])
    >>> tree.set(np.array([1]), np.array([12.0]))
    >>> tree.total, tree[np.array([0, 1])]
    (16.0, array([ 1., 12.]))
    """

    def __init__(self, values: ArrayLike) -> None:
        leaves = np.asarray(values, dtype=np.float64)
        if leaves.ndim != 1 or not leaves.size:
            raise invalid("values", leaves.shape, "be a vector of at least one", "pass the scores")
        if not (leaves.min() >= 0.0 and leaves.max() < np.inf):
            bad = leaves[~(np.isfinite(leaves) & (leaves >= 0.0))][:3].tolist()
            raise invalid("values", bad, "be finite and not negative", "check the scores")
        self.size = leaves.size
        self._levels = [_rows_of(leaves)]
        self._top = self._levels[-1].sum(axis=1)
        while len(self._top) > TOP:
            self._levels.append(_rows_of(self._top))
            self._top = self._levels[-1].sum(axis=1)
        self.total = float(self._top.sum())

    @property
    def values(self) -> NDArray[np.float64]:
        """All values, shape (n,): a view, to be read only."""
        return self._levels[0].reshape(-1)[: self.size]

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Values at ``indices``."""
        return self.values[indices]

    def set(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Replace some values; where an index stands twice, the last value stays.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Positions in ``range(n)``.
        values : ndarray of float64, shape (b,)
            Finite and not negative; not checked again, see
            :func:`~flwr_hetero.core.importance.check_importance`.
        """
        self._levels[0].reshape(-1)[indices] = values
        sums = [level.reshape(-1) for level in self._levels[1:]] + [self._top]
        for level, above in zip(self._levels, sums, strict=True):
            indices = indices // FANOUT
            if len(indices) > TOP:  # summing a row twice does no harm but costs memory
                indices = np.unique(indices)
            above[indices] = level[indices].sum(axis=1)
        self.total = float(self._top.sum())

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Map points of [0, 1) to indices, each index with a share value / total.

        Parameters
        ----------
        points : ndarray of float64, shape (b,)
            Uniform draws make this a draw with replacement.

        Returns
        -------
        ndarray of int64, shape (b,)
            Indices whose value is greater than 0.

        Raises
        ------
        ValueError
            If all values are 0.
        """
        sums = np.cumsum(self._top)
        if sums[-1] <= 0.0:
            raise ValueError("all values are 0: there is nothing to draw.")
        # rounding may leave a point at or past the last sum: keep it inside, here and below
        rest = np.minimum(points * sums[-1], np.nextafter(sums[-1], 0.0))
        node: NDArray[np.int64] = sums.searchsorted(rest, side="right")
        rest = rest - sums[node - 1] * (node > 0)
        line = np.arange(len(points))
        for level in reversed(self._levels):
            sums = np.cumsum(level[node], axis=1)
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            child = np.count_nonzero(sums <= rest[:, None], axis=1)
            rest = rest - sums[line, child - 1] * (child > 0)
            node = node * FANOUT + child
        return node


def _rows_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Copy a vector into rows of FANOUT, the last one filled up with zeros."""
    rows = np.zeros((-(-values.size // FANOUT), FANOUT))
    rows.reshape(-1)[: values.size] = values
    return rows
