r"""What signs do to an order, and how well balanced the orders of all nodes are together.

References
----------
.. [1] Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated
   Training", NeurIPS 2023, Algorithm 1 and Eq. 8.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid

Signs = NDArray[np.int8]


def unit_signs(pair_signs: ArrayLike, num_units: int) -> Signs:
    """Give both units of each pair their sign: s to the first, -s to the second.

    Parameters
    ----------
    pair_signs : array_like of int, shape (num_units // 2,)
        +1 or -1 for each pair.
    num_units : int
        Units in the order; if odd, the last is in no pair.

    Returns
    -------
    ndarray of int8, shape (num_units,)
        For :func:`reorder`. A last unit without a partner has +1, which puts it in the middle
        slot of the next order, so that another one is last then.

    Raises
    ------
    ValueError
        If the number of signs is not that of the pairs.

    Examples
    --------
    >>> unit_signs([-1, 1], 5)
    array([-1,  1,  1, -1,  1], dtype=int8)
    """
    pairs = np.asarray(pair_signs, np.int8)
    if pairs.shape != (num_units // 2,):
        rule = f"have shape ({num_units // 2},) for {num_units} units"
        raise invalid("pair_signs", pairs.shape, rule, "pass one sign per pair")
    signs = np.ones(num_units, np.int8)
    signs[0 : 2 * len(pairs) : 2], signs[1::2] = pairs, -pairs
    return signs


def reorder(order: ArrayLike, signs: ArrayLike) -> NDArray[np.int64]:
    """Put units with +1 in front as visited and units with -1 behind, reversed (Algorithm 1).

    Parameters
    ----------
    order : array_like of int, shape (num_units,)
        The order just visited: a permutation.
    signs : array_like of int, shape (num_units,)
        +1 or -1 for each position of that order (not for each unit), from :func:`unit_signs`.

    Returns
    -------
    ndarray of int64, shape (num_units,)
        The next order.

    Raises
    ------
    ValueError
        If ``order`` is no permutation or ``signs`` holds anything but one +1 or -1 per unit.

    Examples
    --------
    >>> reorder([3, 0, 2, 1], [1, -1, -1, 1])
    array([3, 1, 2, 0])
    """
    visited, sign = checked_order(order), np.asarray(signs)
    if sign.shape != visited.shape or not (np.abs(sign) == 1).all():
        rule = f"hold +1 or -1 for each of {len(visited)} units"
        raise invalid("signs", sign.shape, rule, "use unit_signs for signs of pairs")
    return np.concatenate([visited[sign > 0], visited[sign < 0][::-1]])


def checked_order(order: ArrayLike) -> NDArray[np.int64]:
    """Return an order as integers, if it is one.

    Parameters
    ----------
    order : array_like of int, shape (num_units,)
        A permutation of ``range(num_units)``.

    Returns
    -------
    ndarray of int64, shape (num_units,)
        The order.

    Raises
    ------
    ValueError
        If it is no permutation.

    Examples
    --------
    >>> checked_order([1, 1])
    Traceback (most recent call last):
    ...
    ValueError: order must be a permutation of range(2), got ...: start afresh.
    """
    units = np.asarray(order)
    seen = np.zeros(units.size, np.bool_)
    if units.ndim == 1 and units.dtype.kind in "iu" and units.size:
        seen[units[(units >= 0) & (units < units.size)]] = True
    if units.ndim != 1 or not seen.all():
        rule = f"be a permutation of range({units.size})"
        raise invalid("order", units.tolist()[:5], rule, "start afresh")
    return units.astype(np.int64)


def herding_bound(vectors: ArrayLike, orders: ArrayLike) -> float:
    r"""Measure how far the prefixes of orders, visited side by side, are from the mean (Eq. 8).

    .. math:: H = \max_l \left\| \sum_{j=1}^{l} \sum_{i=1}^{m}
              \left( v_{i, \pi_i(j)} - \bar v \right) \right\|_\infty

    Parameters
    ----------
    vectors : array_like of float, shape (num_nodes, num_units, dim)
        Gradient of each unit.
    orders : array_like of int, shape (num_nodes, num_units)
        Each node's order.

    Returns
    -------
    float
        The bound; small is good. The paper takes vectors that sum to 0, here the mean over all
        nodes and units is subtracted.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Examples
    --------
    >>> vectors = [[[1.0], [1.0], [-1.0], [-1.0]]]
    >>> herding_bound(vectors, [[0, 1, 2, 3]]), herding_bound(vectors, [[0, 2, 1, 3]])
    (2.0, 1.0)
    """
    values, visited = np.asarray(vectors), np.asarray(orders)
    if values.ndim != 3 or visited.shape != values.shape[:2]:
        rule = "have shape (num_nodes, num_units), vectors one axis more"
        raise invalid("orders", (visited.shape, values.shape), rule, "pass an order per node")
    steps = np.zeros(values.shape[1:])
    for vector, order in zip(values, visited, strict=True):
        steps += vector[order]
    steps -= steps.mean(axis=0)
    return float(np.abs(np.cumsum(steps, axis=0, out=steps)).max(initial=0.0))


def relative_herding(passes: Sequence[NDArray[np.floating]]) -> float:
    r"""Measure the orders that nodes have just visited, whatever the scale and length of gradients.

    .. math:: \max_l \Big\| \sum_{j \le l} \sum_i (v_{ij} - \bar v_i) \Big\|_2 \Big/
              \sqrt{\operatorname{mean}_{ij} \| v_{ij} - \bar v_i \|_2^2}

    Parameters
    ----------
    passes : sequence of ndarray of float, shape (num_units, dim)
        Vectors of each node's units in the order of its visit.

    Returns
    -------
    float
        Eq. 8 with the Euclidean norm, which sketches keep, in usual deviations of a unit; so it
        can be compared over a training in which gradients get smaller.

    Notes
    -----
    A node that has ended its pass adds nothing to longer prefixes.

    Examples
    --------
    >>> relative_herding([np.array([[5.0], [5.0], [3.0], [3.0]])])
    2.0
    """
    centred = [np.asarray(each, np.float64) for each in passes]
    centred = [each - each.mean(axis=0) for each in centred]
    steps = np.zeros((max(map(len, centred)), centred[0].shape[1]))
    for each in centred:
        steps[: len(each)] += each
    squares = np.concatenate([np.square(each).sum(axis=1) for each in centred])
    furthest = np.linalg.norm(np.cumsum(steps, axis=0), axis=1).max()
    return float(furthest / (np.sqrt(squares.mean()) or 1.0))
