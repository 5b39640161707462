"""Mercury's groups: which samples are scored next, and how fresh each group is (section 4.1)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid


class Groups(NamedTuple):
    """Non-overlapping groups of the local data, refreshed one after the other.

    Attributes
    ----------
    order : ndarray of int64, shape (num_samples,)
        A permutation; group i holds ``order[bounds[i]:bounds[i + 1]]``.
    bounds : ndarray of int64, shape (num_groups + 1,)
        From 0 to num_samples, increasing.
    turn : int
        The group whose importance is computed next.
    size : int
        Size to which groups are cut at the next chance.

    Examples
    --------
    >>> groups = Groups(np.array([3, 0, 2, 1]), np.array([0, 1, 4]), turn=0, size=2)
    >>> groups.sizes.tolist(), groups.members(-1).tolist()
    ([1, 3], [0, 2, 1])
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]
    turn: int
    size: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples M_i per group, shape (num_groups,)."""
        return np.diff(self.bounds)

    def members(self, group: int) -> NDArray[np.int64]:
        """Sample indices of one group; -1 is the last."""
        group %= len(self.bounds) - 1
        return self.order[self.bounds[group] : self.bounds[group + 1]]


def cut(length: int, size: int) -> NDArray[np.int64]:
    """Cut a length into pieces of nearly equal size.

    Parameters
    ----------
    length : int
        At least 0.
    size : int
        Largest piece wanted, at least 1.

    Returns
    -------
    ndarray of int64, shape (pieces + 1,)
        Bounds from 0 to ``length``; the pieces differ by at most 1.

    Examples
    --------
    >>> cut(10, 4)
    array([ 0,  3,  6, 10])
    """
    pieces = -(-length // size)
    return np.arange(pieces + 1) * length // max(pieces, 1)


def make_groups(num_samples: int, num_groups: int, rng: np.random.Generator) -> Groups:
    """Split the local data into random groups of nearly equal size.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    num_groups : int
        D, at most N.
    rng : np.random.Generator
        Draws the permutation.

    Returns
    -------
    Groups
        With group 0 to be refreshed first.

    Raises
    ------
    ValueError
        If ``num_groups`` is not in 1..num_samples.

    Examples
    --------
    >>> make_groups(10, 3, np.random.default_rng(0)).sizes
    array([3, 3, 4])
    """
    if not 1 <= num_groups <= num_samples:
        rule = f"lie between 1 and the {num_samples} samples of the data"
        raise invalid("num_groups", num_groups, rule, "use fewer groups or leave it out")
    bounds = np.arange(num_groups + 1) * num_samples // num_groups
    return Groups(rng.permutation(num_samples), bounds, 0, -(-num_samples // num_groups))


def resize(groups: Groups, size: int) -> Groups:
    """Cut the groups not yet refreshed in this cycle to another size (section 4.3, BACC).

    Parameters
    ----------
    groups : Groups
        The present ones.
    size : int
        Samples per group from now on, at least 1.

    Returns
    -------
    Groups
        The next group has the new size at once; :func:`advance` cuts all at the cycle's end.

    Raises
    ------
    ValueError
        If ``size`` is less than 1.

    Examples
    --------
    >>> groups = make_groups(12, 3, np.random.default_rng(0))
    >>> resize(advance(groups), 3).sizes
    array([4, 2, 3, 3])
    """
    if size < 1:
        raise invalid("size", size, "be at least 1", "a link that leaves no time needs no scoring")
    size = min(size, len(groups.order))
    if size == groups.size:
        return groups
    done = groups.bounds[groups.turn]
    rest = done + cut(len(groups.order) - int(done), size)
    return groups._replace(bounds=np.concatenate([groups.bounds[: groups.turn], rest]), size=size)


def advance(groups: Groups) -> Groups:
    """Pass the turn to the next group; after the last one a new cycle begins.

    Parameters
    ----------
    groups : Groups
        The present ones.

    Returns
    -------
    Groups
        With the turn moved on; if the size was changed on the way, cut anew for a new cycle.

    Examples
    --------
    >>> groups = make_groups(12, 2, np.random.default_rng(0))
    >>> advance(groups).turn, advance(advance(groups)).turn
    (1, 0)
    """
    turn = groups.turn + 1
    if turn < len(groups.bounds) - 1:
        return groups._replace(turn=turn)
    if groups.sizes.max() > groups.size or groups.sizes.max() - groups.sizes.min() > 1:
        groups = groups._replace(bounds=cut(len(groups.order), groups.size))
    return groups._replace(turn=0)


def relative_steps(groups: Groups) -> NDArray[np.int64]:
    """Tell in which step of the cycle each group was last refreshed: t_i of Eq. 6.

    Parameters
    ----------
    groups : Groups
        The present ones.

    Returns
    -------
    ndarray of int64, shape (num_groups,)
        This cycle's groups count from 0, the previous cycle's from ``-num_groups``.

    Notes
    -----
    Groups never refreshed count as refreshed in the cycle before the first, so that each
    group has each age once in every cycle.

    Examples
    --------
    >>> relative_steps(advance(make_groups(12, 3, np.random.default_rng(0))))
    array([ 0, -2, -1])
    """
    steps = np.arange(len(groups.bounds) - 1)
    return np.where(steps < groups.turn, steps, steps - len(steps))


def check_groups(groups: Groups, num_samples: int) -> None:
    """Refuse restored groups that are none.

    Parameters
    ----------
    groups : Groups
        From a saved state.
    num_samples : int
        Size N of the local data set.

    Raises
    ------
    ValueError
        If the order is no permutation, the bounds do not cut it, or the turn is out of range.

    Examples
    --------
    >>> check_groups(make_groups(6, 2, np.random.default_rng(0)), 6)
    """
    order, bounds, turn, size = groups
    if not np.array_equal(np.sort(order), np.arange(num_samples)):
        raise ValueError("the groups hold no permutation of the data: start afresh.")
    ends = len(bounds) >= 2 and bounds[0] == 0 and bounds[-1] == num_samples
    if not ends or np.diff(bounds).min() < 1 or not 0 <= turn < len(bounds) - 1 or size < 1:
        raise ValueError("the bounds of the groups are damaged: start afresh.")
