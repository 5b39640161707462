"""FedBuff, Nguyen et al.: Algorithm 1 on NumPy arrays, and weights that do not depend on speed."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MEMORY = 10
"""Replies of a node over which its means are taken."""
PRIOR = 5
"""Idle times of a node that the mean of all nodes counts as much as."""
OUTLIER = 10.0
"""Usual intervals that a single one counts at most."""
OUTLYING = 2.0
"""Largest weight of an update by default, in weights that a tenth of the nodes reach."""
SHORTEST_S = 1e-3
"""Shortest interval between two replies of a node."""


# --- Algorithm 1 -------------------------------------------------------------------------------


def staleness_weights(staleness: ArrayLike, exponent: float = 0.5) -> Floats:
    r"""Weigh updates down by the merges since they started (Alg. 1, l. 4).

    .. math:: a(s) = (1 + s)^{-\alpha}

    The paper's exponent is 1/2; 0 treats all alike.

    staleness: (num_updates,), at least 0 -> (num_updates,), in (0, 1].

    >>> staleness_weights([0, 3, 8])
    array([1.        , 0.5       , 0.33333333])
    """
    return np.asarray((1.0 + np.asarray(staleness, np.float64)) ** -exponent)


def default_buffer(num_at_work: int) -> int:
    """Return the number of updates K of a merge: half of the nodes at work, at least 3.

    Fewer than a quarter made merges noisy in our runs; the paper has 10 of 1,000 and more.

    >>> [default_buffer(n) for n in (1, 3, 6, 20)]
    [1, 3, 3, 10]
    """
    return min(max(3, -(-num_at_work // 2)), max(1, num_at_work))


# --- weights by examples, whatever the speed: not in the paper ---------------------------------


class Weights(NamedTuple):
    """Weights of a buffer's updates, the step of its merge, and what clipping left out."""

    weights: Floats
    step: float
    clipped_share: float


def merge_weights(
    weights: ArrayLike, all_weights: ArrayLike, replies_per_s: ArrayLike, limit: float = inf
) -> Weights:
    r"""Weigh a buffer's updates against the mean of all replies, not that of the buffer.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_i \frac{\min(v_i, c \bar v)}{\bar v} d_i,
              \qquad \bar v = \frac{\sum_j r_j v_j}{\sum_j r_j}

    Node j sends :math:`r_j` replies a second. With :math:`v_j = p_j / r_j` it adds
    :math:`p_j d_j` per second, whatever its speed. Against the mean of the buffer a heavy update
    would count less, for it makes that mean.

    weights: (num_updates,), their v; all_weights, replies_per_s: (num_nodes,), of every node;
    limit: c, at least 1.

    >>> merge_weights([2.0, 2.0], [2.0, 4.0], [0.5, 0.5]).step
    0.6666666666666666
    """
    raw, every = np.asarray(weights, np.float64), np.asarray(all_weights, np.float64)
    rate = np.asarray(replies_per_s, np.float64)
    most = limit * float(np.average(every, weights=rate)) if limit < inf else inf
    mean = float(np.average(np.minimum(every, most), weights=rate))
    clipped = np.minimum(raw, most)
    if not mean:
        return Weights(np.ones(len(raw)), 1.0, 0.0)
    left_out = 1.0 - float(clipped.sum() / raw.sum()) if raw.sum() else 0.0
    return Weights(clipped, float(clipped.mean()) / mean, left_out)


def largest_weight(weights: ArrayLike) -> float:
    """Return the weight above which updates are cut: twice what a tenth of the nodes reach.

    One node cannot set it. weights: (num_nodes,).

    >>> largest_weight([1.0, 1.0, 15.0]), largest_weight([1.0, 15.0, 15.0])
    (2.0, 30.0)
    """
    falling = np.sort(np.asarray(weights, np.float64))[::-1]
    if len(falling) < 2:
        return inf
    return OUTLYING * float(falling[max(2, -(-len(falling) // 10)) - 1])


@dataclass
class Usual:
    """What is usual of a node's replies: running means, of the last ones or of its idle times.

    >>> usual = Usual()
    >>> usual.see(weight=2.0, age_s=5.0, idle_s=None, discount=0.5)
    >>> usual.interval_s(idle_s=1.0)
    6.0
    """

    weight: float = 0.0
    age_s: float = 0.0
    discount: float = 1.0
    count: int = 0
    idle_s: float = 0.0
    starts: int = 0

    def see(self, weight: float, age_s: float, idle_s: float | None, discount: float) -> None:
        """Learn from a reply; a time counts as ten usual ones at most, as after an absence."""
        self.count = min(self.count + 1, MEMORY)
        longest_s = OUTLIER * self.age_s if self.count > 1 else inf
        age_s = min(max(age_s, SHORTEST_S), longest_s)
        self.weight += (weight - self.weight) / self.count
        self.age_s += (age_s - self.age_s) / self.count
        self.discount += (discount - self.discount) / self.count
        if idle_s is not None:
            self.starts += 1
            longest_s = OUTLIER * (self.age_s + self.idle_s) if self.starts > MEMORY else inf
            self.idle_s += (min(idle_s, longest_s) - self.idle_s) / self.starts

    def interval_s(self, idle_s: float) -> float:
        """Return the time from reply to reply; ``idle_s`` is the mean of all nodes.

        Idle nodes are drawn uniformly, so that a few of a node's own idle times are but noise.
        """
        mean_s = (PRIOR * idle_s + self.starts * self.idle_s) / (PRIOR + self.starts)
        return self.age_s + mean_s
