r"""Pair balancing among nodes that may not meet again.

Algorithm 4 keeps the sum over *all* nodes short and lets each node's own sum wander: worth a lot
while the same nodes visit their orders side by side, worth nothing once their partners change.
Here the sign also looks at the node's own sum :math:`r_i`, with a share :math:`h_i` of the vote:

.. math:: s = +1 \iff \left\langle (1 - h_i) \sum_j r_j + h_i r_i, \, z \right\rangle \le 0

Share 0 is Algorithm 4; share 1 is balancing each node by itself (ID-GraB).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.orders import Signs
from flwr_hetero.core.pair_balance import Vectors


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
    With shares of 0 the signs are those of :func:`~flwr_hetero.core.pair_balance.pair_balance`
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
