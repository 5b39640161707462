r"""FedBuff on NumPy arrays, and weights that do not depend on how often a node replies.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1, for a model w of version t::

    1: start nodes, drawn uniformly from the idle ones            draw_nodes
    2: on the update d_i of a node that started at version t_i:   engine.update
    3:     s <- t - t_i                                           staleness_weights
    4:     buffer <- buffer + a(s) d_i                            staleness_weights
    5:     start another idle node                                draw_nodes
    6: when the buffer holds K updates:                           full_buffer
    7:     w <- w + eta_g sum(buffer) / K;  t <- t + 1            strategy.Rule.on_replies
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_choice, check_number

Floats = NDArray[np.float64]
_Item = TypeVar("_Item")

NODE_LIMIT = 1.5
"""Largest share of a node in all updates, in even shares of the nodes in flight."""
LONGEST = 5.0
"""Medians of the replies' contributions that one may move the model by."""
OUTLYING = 2.0
"""Largest weight of an update, in weights that a tenth of the nodes reach."""


class Shares(NamedTuple):
    """What the updates of a server update count."""

    scales: Floats
    """By update: the factor of its length."""
    step: float = 1.0
    """The factor of the mean of all updates."""
    factors: Floats | None = None
    """By update: the factor of its weight in the mean. None: all weigh alike."""
    clipped_share: float = 0.0
    """The part of the weights that was cut off, because it was above most nodes' weights."""
    bounded_share: float = 0.0
    """The part of the weights that was cut off, because the updates are long."""
    mean_discount: float = 1.0
    """The mean discount of stale updates over all replies."""


# --- Algorithm 1 -------------------------------------------------------------------------------


def draw_nodes(idle: Sequence[int], room: int, rng: np.random.Generator) -> list[int]:
    """Draw as many idle nodes as there is room for, uniformly.

    >>> draw_nodes([7, 8, 9], 5, np.random.default_rng(0))
    [7, 8, 9]
    """
    if room >= len(idle):
        return list(idle)
    # Alg. 1, l. 1 and 5: start idle nodes, drawn uniformly
    return [idle[i] for i in sorted(rng.choice(len(idle), room, replace=False).tolist())]


def staleness_weights(started: ArrayLike, version: int, exponent: float = 0.5) -> Floats:
    r"""Weigh updates down by the server updates since they started.

    .. math:: a(s) = (1 + s)^{-\alpha}

    started: (num_updates,), versions of at most this one -> (num_updates,), in (0, 1].

    >>> staleness_weights([9, 6, 1], version=9)
    array([1.        , 0.5       , 0.33333333])
    """
    # Alg. 1, l. 3: s <- t - t_i
    staleness = version - np.asarray(started, np.float64)
    # l. 4: a(s)
    return np.asarray((1.0 + staleness) ** -exponent)


def staleness_exponent(staleness: str | float) -> float:
    """Return the exponent that a user asks for; the paper's is 1/2, 0 treats all alike.

    >>> staleness_exponent("sqrt"), staleness_exponent("none"), staleness_exponent(1)
    (0.5, 0.0, 1.0)
    """
    if isinstance(staleness, str):
        check_choice("staleness", staleness, ("sqrt", "none"), "or give an exponent")
        return 0.5 if staleness == "sqrt" else 0.0
    return float(check_number("staleness", staleness, "[0, inf)"))


def full_buffer(buffer: Sequence[_Item], size: int) -> list[_Item]:
    """Return the first K updates when there are as many; else none.

    >>> full_buffer("ab", 3), full_buffer("abcd", 3)
    ([], ['a', 'b', 'c'])
    """
    # Alg. 1, l. 6: when the buffer holds K updates
    return list(buffer[:size]) if len(buffer) >= size else []


def default_buffer(in_flight: int) -> int:
    """Return the number of updates K of a server update: half of the nodes, at least 3.

    >>> [default_buffer(n) for n in (1, 3, 6, 20)]
    [1, 3, 3, 10]
    """
    return min(max(3, -(-in_flight // 2)), max(1, in_flight))


# --- votes by node, whatever its pace: not in the paper ------------------------------------------


@dataclass
class Turns:
    """Whose turn it is: a node is asked at most ``limit`` times as often as nodes are on average.

    Each instruction to any node is a turn. If n nodes train at the same time, a node pays n /
    ``limit`` turns for an instruction. It may be in debt by one instruction.

    >>> turns = Turns(cost=3.0)
    >>> for nodes in (["a", "b", "c", "d"], ["a"], ["a"]):
    ...     turns.take(nodes)
    >>> turns.may_go("a"), turns.may_go("b")
    (False, True)
    """

    cost: float = 0.0
    """Number of turns that a node pays for an instruction."""
    given: int = 0
    paid_until: dict[str, float] = field(default_factory=dict)

    def may_go(self, node: str) -> bool:
        """Return whether a node may be asked."""
        return self.paid_until.get(node, 0.0) <= self.given + self.cost

    def take(self, nodes: Sequence[str]) -> None:
        """Let these nodes pay."""
        for node in nodes:
            self.paid_until[node] = max(self.paid_until.get(node, 0.0), self.given) + self.cost
        self.given += len(nodes)

    def give_back(self, node: str) -> None:
        """Let a node have its turn back, of which nothing came."""
        self.paid_until[node] = self.paid_until.get(node, 0.0) - self.cost


def largest_rate(rates: ArrayLike, largest_share: float) -> float:
    """Return the rate to which rates, (num_nodes,), are cut: a node has this share of their sum.

    >>> round(largest_rate([1.0, 1.0, 1.0, 1000.0], largest_share=0.4), 9)
    2.0
    """
    rising = np.sort(np.asarray(rates, np.float64))
    for num_cut in range(len(rising)):
        kept = rising[: len(rising) - num_cut]
        if num_cut * largest_share < 1:
            most = largest_share * kept.sum() / (1 - num_cut * largest_share)
            if kept[-1] <= most:
                return float(most)
    return inf


# --- weights by examples, whatever the speed: not in the paper ---------------------------------


def mean_weight(
    all_weights: ArrayLike, replies_per_s: ArrayLike, all_most: ArrayLike = inf
) -> float:
    r"""Return the mean weight of all replies.

    .. math:: \bar v = \frac{\sum_j r_j \min(v_j, c_j)}{\sum_j r_j}

    all_weights, replies_per_s: (num_nodes,), v and r; all_most: c, of each node or one for all.

    >>> mean_weight([2.0, 4.0], [0.5, 0.5]), mean_weight([2.0, 4.0], [0.5, 0.5], all_most=2.0)
    (3.0, 2.0)
    """
    counted = np.minimum(all_weights, all_most)
    return float(np.average(counted, weights=np.asarray(replies_per_s)))


def update_weights(
    weights: ArrayLike, mean: float, most: ArrayLike = inf
) -> tuple[Floats, float, float]:
    r"""Weigh a buffer's updates against the mean of all replies, not that of the buffer.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_i \frac{\min(v_i, c_i)}{\bar v} d_i

    Node j sends :math:`r_j` replies a second: with :math:`v_j = p_j / r_j` it adds :math:`p_j d_j`.

    weights: (num_updates,), v; mean: of all replies; most: c, of each update or one for all ->
    (num_updates,), the step of their mean, and the share cut off.

    >>> update_weights([2.0, 2.0], mean=3.0)[1]
    0.6666666666666666
    """
    raw = np.asarray(weights, np.float64)
    clipped = np.minimum(raw, most)
    if not mean:
        return np.ones(len(raw)), 1.0, 0.0
    left_out = 1.0 - float(clipped.sum() / raw.sum()) if raw.sum() else 0.0
    return clipped, float(clipped.mean()) / mean, left_out


def largest_weight(weights: ArrayLike) -> float:
    """Return the weight above which updates are cut: twice what a tenth of (num_nodes,) reach.

    >>> largest_weight([1.0, 1.0, 15.0]), largest_weight([1.0, 15.0, 15.0])
    (2.0, 30.0)
    """
    falling = np.sort(np.asarray(weights, np.float64))[::-1]
    if len(falling) < 2:
        return inf
    # At least two nodes must reach it.
    return OUTLYING * float(falling[max(2, -(-len(falling) // 10)) - 1])


def usual_contribution(weights: ArrayLike, lengths: ArrayLike, replies_per_s: ArrayLike) -> float:
    r"""Return by how much most replies move the model.

    .. math:: M = \operatorname{median}_{replies} v_j |d_j|

    weights, lengths, replies_per_s: (num_nodes,); lengths of their last updates, 0 where unknown.

    >>> usual_contribution([1.0, 1.0, 80.0], [2.0, 2.0, 1.0], [9.0, 9.0, 1.0])
    2.0
    """
    norms = np.asarray(lengths, np.float64)
    known = norms > 0
    if not known.any():
        return 0.0
    moved = (np.asarray(weights, np.float64) * norms)[known]
    order = np.argsort(moved)
    rates = np.asarray(replies_per_s, np.float64)[known]
    shares = np.cumsum(rates[order])
    return float(moved[order][np.searchsorted(shares, shares[-1] / 2)])


def weights_by_length(lengths: ArrayLike, usual: float, longest: float = 0.0) -> Floats:
    r"""Return the weights above which updates move the model far more than most do, or ever did.

    .. math:: c_i = \frac{\max(5 M_t, \max_{s < t} M_s)}{|d_i|}

    lengths: (num_nodes,), of their last updates, 0 where unknown; usual: M; longest: the largest M
    so far -> (num_nodes,), infinite where unknown.

    >>> weights_by_length([2.0, 2.0, 1.0], usual=2.0)
    array([ 5.,  5., 10.])
    """
    norms = np.asarray(lengths, np.float64)
    known = norms > 0
    most = max(LONGEST * usual, longest)
    return np.asarray(np.where(known, most / np.where(known, norms, 1.0), inf))
