"""CD-GraB, Cooper et al., NeurIPS 2023: orders from signs, signs from pairs, and Eq. 8."""

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import invalid

Signs = NDArray[np.int8]
Vectors = NDArray[np.floating]


def unit_signs(pair_signs: ArrayLike, num_units: int) -> Signs:
    """Give the first unit of each pair the pair's sign, the second the opposite.

    pair_signs: (num_units // 2,) -> (num_units,). A last unit without a partner gets +1, which
    moves it to the middle, so that another unit is the last one of the next order.

    >>> unit_signs([-1, 1], 5)
    array([-1,  1,  1, -1,  1], dtype=int8)
    """
    pairs = np.asarray(pair_signs, np.int8)
    if pairs.shape != (num_units // 2,):
        raise invalid("pair_signs", pairs.shape, f"have shape ({num_units // 2},)")
    signs = np.ones(num_units, np.int8)
    signs[0 : 2 * len(pairs) : 2] = pairs
    signs[1::2] = -pairs
    return signs


def reorder(order: ArrayLike, signs: ArrayLike) -> NDArray[np.int64]:
    """Put units with +1 in front as visited, units with -1 behind in reverse (Alg. 1).

    order: (num_units,), a permutation; signs: (num_units,), +1 or -1 per position of ``order``
    -> (num_units,), the next order.

    >>> reorder([3, 0, 2, 1], [1, -1, -1, 1])
    array([3, 1, 2, 0])
    """
    visited = np.asarray(order)
    sign = np.asarray(signs)
    is_list = visited.ndim == 1 and visited.size and visited.dtype.kind in "iu"
    if not is_list or not np.array_equal(np.sort(visited), np.arange(visited.size)):
        raise invalid("order", visited.tolist()[:5], f"be a permutation of range({visited.size})")
    if sign.shape != visited.shape or not (np.abs(sign) == 1).all():
        raise invalid("signs", sign.shape, f"hold +1 or -1 for each of {len(visited)} units")
    front = visited[sign > 0]
    back = visited[sign < 0]
    return np.concatenate([front, back[::-1]]).astype(np.int64)


def pair_balance(running_sum: ArrayLike, pair_diffs: Iterable[ArrayLike]) -> tuple[Vectors, Signs]:
    r"""Give each pair difference the sign that keeps the running sum short (Alg. 2).

    .. math:: s = +1 \iff \|r + z\| \le \|r - z\| \iff \langle r, z \rangle \le 0,
              \qquad r \leftarrow r + s z

    running_sum: (dim,), zeros at the start of an epoch; pair_diffs: (num_pairs, dim), first minus
    second unit of each pair in the order of the visit -> running_sum: (dim,), new and at least
    float32; signs: (num_pairs,) of the first units, +1 on a tie.

    >>> pair_balance([0.0, 0.0], [[1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    (array([-2.,  1.]), array([ 1, -1,  1], dtype=int8))
    """
    start = np.asarray(running_sum)
    diffs = [np.asarray(diff) for diff in pair_diffs]
    shapes = {diff.shape for diff in diffs}
    if start.ndim != 1 or not shapes <= {start.shape}:
        raise invalid("pair_diffs", shapes, f"have rows of the shape of running_sum, {start.shape}")
    total = start.astype(np.result_type(start, np.float32, *{diff.dtype for diff in diffs}))
    with np.errstate(invalid="ignore", over="ignore"):
        signs = [_add_signed(diff, float(total @ diff), total) for diff in diffs]
    if not np.isfinite([total.min(initial=0), total.max(initial=0)]).all():
        raise invalid("pair_diffs", "nan or inf", "be finite")
    return total, np.array(signs, np.int8)


def _add_signed(diff: Vectors, vote: float, *sums: Vectors) -> int:
    """Add a difference to sums in place, with the sign against the vote; return the sign."""
    # The greedy form of Balance (appendix B.2). A tie gives +1, as in the authors' code.
    sign = 1 if vote <= 0 else -1
    add = np.add if sign > 0 else np.subtract
    for total in sums:
        add(total, diff, out=total)
    return sign


def balance_group(
    own_sums: Sequence[Vectors], pair_diffs: Sequence[Vectors], own_weights: ArrayLike
) -> tuple[Vectors, list[Signs]]:
    r"""Balance the pairs of nodes that are at the same position of their orders (Alg. 4, l. 4-13).

    A node's own sum :math:`r_i` and its weight h replace r in the rule of :func:`pair_balance` by
    :math:`(1 - h) r + h r_i` (see :func:`own_share`). All weights are 0 in the paper.

    own_sums: per node (dim,), updated in place, together the r of Alg. 4; pair_diffs: per node
    (num_pairs, dim), finite; own_weights: (num_nodes,)
    -> running_sum: (dim,), the sum of the new own sums; signs: per node (num_pairs,).

    >>> diffs = [np.ones((2, 1)), np.ones((2, 1))]
    >>> [s.tolist() for s in balance_group([np.zeros(1), np.zeros(1)], diffs, [0.0, 0.0])[1]]
    [[1, 1], [-1, -1]]
    """
    weights = np.asarray(own_weights, np.float64).tolist()
    running_sum = reduce(np.add, own_sums, np.zeros(len(own_sums[0]), np.float32))
    signs = np.ones((len(pair_diffs), len(pair_diffs[0])), np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        # Alg. 4, l. 4 and 9: pair by pair, and in each pair node by node.
        for pair in range(signs.shape[1]):
            for node, (own_sum, weight) in enumerate(zip(own_sums, weights, strict=True)):
                diff = pair_diffs[node][pair]
                vote = float(running_sum @ diff)
                if weight:
                    vote = (1 - weight) * vote + weight * float(own_sum @ diff)
                # l. 10
                signs[node, pair] = _add_signed(diff, vote, running_sum, own_sum)
    return running_sum, list(signs)


def own_share(overlap: ArrayLike, num_nodes: int) -> NDArray[np.float64]:
    r"""Weight of nodes' own sums, from how much of their group stays together.

    .. math:: \lambda = \frac{\sqrt{m (1 - q^2)}}{q}, \qquad h = \frac{\lambda}{1 + \lambda}

    overlap: (num_nodes,), the part q of its group that a node is expected to meet again
    -> (num_nodes,), in [0, 1]: 0 for a fixed group, 1 for a group of strangers or of one node.

    Not in the paper, which leaves partial participation out. With a vote of
    :math:`R + \lambda r_i`, :math:`\|R\|^2` settles in proportion to :math:`1 + \lambda`, a node's
    own deviation to :math:`(1 + \lambda) / \lambda`. The next group's sum has about :math:`q^2` of
    the first and :math:`m (1 - q^2)` of the second; this :math:`\lambda` makes it least.

    >>> own_share([1.0, 0.5, 0.0], num_nodes=3)
    array([0. , 0.75, 1. ])
    """
    kept = np.asarray(overlap, np.float64)
    if num_nodes < 2:
        return np.ones_like(kept)
    strange = np.sqrt(num_nodes * (1.0 - kept**2))
    return np.asarray(strange / (kept + strange))


def walk_balance(
    running_sum: ArrayLike,
    pair_diffs: Iterable[ArrayLike],
    threshold: float,
    rng: np.random.Generator,
) -> tuple[Vectors, Signs]:
    r"""Give signs at random; a sign is the likelier, the shorter the sum it leads to (Alg. 5).

    .. math:: P(s = +1) = \frac{1}{2} - \frac{\langle r, z \rangle}{2 c}

    running_sum: (dim,); pair_diffs: (num_pairs, dim), of length at most 1; threshold: c -> as
    :func:`pair_balance`. Beyond c, where the paper's walk fails, the probability is cut to [0, 1].
    Only the theory has this rule: greedy signs keep sums shorter.

    >>> walk_balance([5.0], [[1.0], [1.0]], threshold=2.0, rng=np.random.default_rng(0))
    (array([3.]), array([-1, -1], dtype=int8))
    """
    total = np.array(running_sum, np.float64)
    diffs = [np.asarray(diff) for diff in pair_diffs]
    longest = max((float(np.linalg.norm(diff)) for diff in diffs), default=0.0)
    if not longest <= 1 + 1e-6:
        raise invalid("pair_diffs", longest, "have a length of at most 1", "divide by the longest")
    signs = np.ones(len(diffs), np.int8)
    for pair, diff in enumerate(diffs):
        chance = 0.5 - float(total @ diff) / (2 * threshold)
        signs[pair] = 1 if rng.random() < chance else -1
        total += signs[pair] * diff
    return total, signs


def herding_bound(vectors: ArrayLike, orders: ArrayLike) -> float:
    r"""Largest distance of a prefix of all orders, visited side by side, from the mean (Eq. 8).

    .. math:: H = \max_l \left\| \sum_{j=1}^{l} \sum_{i=1}^{m}
              \left( v_{i, \pi_i(j)} - \bar v \right) \right\|_\infty

    vectors: (num_nodes, num_units, dim), the gradient of each unit; orders: (num_nodes,
    num_units) -> H. The paper takes vectors that sum to 0; here their mean is subtracted.

    >>> vectors = [[[1.0], [1.0], [-1.0], [-1.0]]]
    >>> herding_bound(vectors, [[0, 1, 2, 3]]), herding_bound(vectors, [[0, 2, 1, 3]])
    (2.0, 1.0)
    """
    nodes = zip(np.asarray(vectors), np.asarray(orders), strict=True)
    # The inner sum of Eq. 8, for each position j.
    steps = np.sum([vector[order] for vector, order in nodes], axis=0)
    steps -= steps.mean(axis=0)
    return float(np.abs(np.cumsum(steps, axis=0, out=steps)).max(initial=0.0))
