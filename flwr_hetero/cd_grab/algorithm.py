"""What signs do to an order, and how well balanced the orders of all nodes are together.

References
----------
.. [1] Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated
   Training", NeurIPS 2023, Algorithm 1 and Eq. 8.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import invalid

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


__all__ = ["herding_bound", "pair_balance", "reorder", "self_balancing_walk"]


Vectors = NDArray[np.floating]


def pair_balance(running_sum: ArrayLike, pair_diffs: ArrayLike) -> tuple[Vectors, Signs]:
    r"""Give each pair difference the sign that keeps the running sum short (Algorithm 2).

    .. math:: s = +1 \iff \|r + z\| \le \|r - z\| \iff \langle r, z \rangle \le 0,
              \qquad r \leftarrow r + s z

    Parameters
    ----------
    running_sum : array_like of float, shape (dim,)
        Signed sum r so far; zeros at the start of an epoch.
    pair_diffs : array_like of float, shape (num_pairs, dim)
        Differences z = first unit - second unit, in the order of the visit. For one step of all
        nodes: a row per node, in fixed order.

    Returns
    -------
    running_sum : ndarray of float, shape (dim,)
        The new sum, float32 if both inputs are, else float64. The inputs are left as they were.
    signs : ndarray of int8, shape (num_pairs,)
        +1 or -1 of the first unit of each pair; the second has the opposite.

    Raises
    ------
    ValueError
        If the shapes do not fit or a value is not finite.

    Notes
    -----
    The greedy rule of all published experiments [1]_. A tie, such as the first pair of an epoch,
    gives +1. Multiplying all vectors by a constant changes no sign.

    Examples
    --------
    >>> pair_balance([0.0, 0.0], [[1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    (array([-2.,  1.]), array([ 1, -1,  1], dtype=int8))
    """
    total, diffs = _inputs(running_sum, pair_diffs)
    signs = np.ones(len(diffs), np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, diff in enumerate(diffs):
            if total @ diff <= 0:
                total += diff
            else:
                total -= diff
                signs[row] = -1
    return _finite(total), signs


def self_balancing_walk(
    running_sum: ArrayLike, pair_diffs: ArrayLike, rng: np.random.Generator, *, c: float = 30.0
) -> tuple[Vectors, Signs]:
    r"""Draw the signs with a bias towards short sums: the rule that the theory is about [2]_.

    .. math:: P(s = +1) = \tfrac12 - \frac{\langle r, z \rangle}{2c}, \quad r \leftarrow r + s z

    Parameters
    ----------
    running_sum, pair_diffs
        As for :func:`pair_balance`; the differences should be no longer than 1.
    rng : np.random.Generator
        One uniform number per pair.
    c : float
        Scale of the walk: the larger, the closer to coin flips.

    Returns
    -------
    running_sum, signs
        As from :func:`pair_balance`.

    Raises
    ------
    ValueError
        As for :func:`pair_balance`, and if ``c`` is not positive.

    Notes
    -----
    The walk as analysed fails where a chance leaves [0, 1]; here it is clipped. The signs depend
    on the scale of the vectors, and the sums stay longer than by the greedy rule.

    Examples
    --------
    >>> self_balancing_walk([9.0], [[1.0], [-1.0]], np.random.default_rng(0), c=5.0)
    (array([7.]), array([-1,  1], dtype=int8))
    """
    if not c > 0:
        raise invalid("c", c, "be positive", "30 is usual for vectors of length 1")
    total, diffs = _inputs(running_sum, pair_diffs)
    signs = np.ones(len(diffs), np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, (diff, draw) in enumerate(zip(diffs, rng.random(len(diffs)), strict=True)):
            if draw < 0.5 - (total @ diff) / (2 * c):
                total += diff
            else:
                total -= diff
                signs[row] = -1
    return _finite(total), signs


def _inputs(running_sum: ArrayLike, pair_diffs: ArrayLike) -> tuple[Vectors, Vectors]:
    """Copy the sum, look at the differences, both in one type."""
    start, diffs = np.asarray(running_sum), np.asarray(pair_diffs)
    if start.ndim != 1 or diffs.ndim != 2 or diffs.shape[1] != len(start):
        rule = f"have shape (num_pairs, dim) beside a running_sum of shape {start.shape}"
        raise invalid("pair_diffs", diffs.shape, rule, "pass one row per pair")
    dtype = np.result_type(start, diffs, np.float32)
    return start.astype(dtype), diffs.astype(dtype, copy=False)


def _finite(total: Vectors) -> Vectors:
    """Refuse a sum that a bad value has spoilt; checking the sum is cheaper than each vector."""
    if not np.isfinite(total).all():
        raise invalid("pair_diffs", total[~np.isfinite(total)][:3], "be finite", "drop bad replies")
    return total


def own_share(overlap: ArrayLike, num_nodes: int) -> NDArray[np.float64]:
    r"""Choose the weight of nodes' own sums from how much of their company they keep.

    .. math:: \lambda = \frac{\sqrt{m (1 - q^2)}}{q}, \qquad h = \frac{\lambda}{1 + \lambda}

    Parameters
    ----------
    overlap : array_like of float, shape (num_nodes,)
        Part q of its partners that a node is expected to meet again, in [0, 1].
    num_nodes : int
        Nodes m that are balanced together.

    Returns
    -------
    ndarray of float64, shape (num_nodes,)
        0 for a steady company, 1 for strangers.

    Notes
    -----
    With a vote of :math:`R + \lambda r_i`, greedy signs settle where :math:`\|R\|^2` goes with
    :math:`1 + \lambda` and a node's own deviation with :math:`(1 + \lambda) / \lambda`. When a
    part q stays, the sum over the next company has about :math:`q^2` of the first and
    :math:`m (1 - q^2)` of the second; :math:`\lambda` makes that least. Not in the paper, which
    leaves changing companies out.

    Examples
    --------
    >>> own_share([1.0, 0.5, 0.0], num_nodes=3)
    array([0. , 0.75, 1. ])
    """
    kept = np.clip(np.asarray(overlap, np.float64), 0.0, 1.0)
    strange = np.sqrt(num_nodes * (1.0 - kept**2))
    return np.asarray(strange / (kept + strange))


def shared_balance(
    own_sums: Sequence[Vectors], pair_diffs: Sequence[Vectors], shares: ArrayLike
) -> tuple[Vectors, list[Signs]]:
    """Give signs to the pairs of several nodes, step by step, nodes in order within a step.

    Parameters
    ----------
    own_sums : sequence of ndarray of float, shape (dim,)
        Signed sum of each node's pairs since its order began; together they are Algorithm 4's r.
        Changed in place: for whole gradients there is no room to hold them twice.
    pair_diffs : sequence of ndarray of float, shape (num_pairs, dim)
        Differences of each node; one with fewer than the others is done earlier.
    shares : array_like of float, shape (num_nodes,)
        Weight of each node's own sum, from :func:`own_share`.

    Returns
    -------
    running_sum : ndarray of float, shape (dim,)
        Sum of the new own sums.
    signs : list of ndarray of int8, shape (num_pairs,)
        +1 or -1 of the first unit of each pair, by node.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Notes
    -----
    With shares of 0 the signs are those of :func:`~flwr_hetero.cd_grab.algorithm.pair_balance`
    on the sum of ``own_sums`` and the nodes' rows, step by step.

    Examples
    --------
    >>> diffs = [np.ones((2, 1)), np.ones((2, 1))]
    >>> [s.tolist() for s in shared_balance([np.zeros(1), np.zeros(1)], diffs, [0.0, 0.0])[1]]
    [[1, 1], [-1, -1]]
    >>> [s.tolist() for s in shared_balance([np.zeros(1), np.zeros(1)], diffs, [1.0, 1.0])[1]]
    [[1, -1], [1, -1]]
    """
    share = np.asarray(shares, np.float64).tolist()
    shapes = {(each.ndim, *each.shape[1:]) for each in pair_diffs}
    if shapes != {(2, *own_sums[0].shape)} or not len(own_sums) == len(pair_diffs) == len(share):
        rule = f"have shape (num_pairs, {len(own_sums[0])}) for each of {len(own_sums)} nodes"
        raise invalid("pair_diffs", [each.shape for each in pair_diffs], rule, "pass one each")
    total = own_sums[0].copy()
    for own_sum in own_sums[1:]:
        total += own_sum
    signs = [np.ones(len(each), np.int8) for each in pair_diffs]
    nodes = list(zip(own_sums, pair_diffs, signs, share, strict=True))
    for p in range(max(map(len, pair_diffs))):
        for own, diffs, sign, alone in nodes:
            if p == len(diffs):
                nodes = [node for node in nodes if len(node[1]) > p]
                continue
            diff = diffs[p]
            vote = (1.0 - alone) * float(total @ diff) if alone < 1.0 else 0.0
            if alone:
                vote += alone * float(own @ diff)
            if vote <= 0:
                total += diff
                own += diff
            else:
                total -= diff
                own -= diff
                sign[p] = -1
    return total, signs
