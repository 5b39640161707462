r"""FedBuff on NumPy arrays, and weights that do not depend on how often a node replies.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1, for a model w of version t::

    1: start nodes, drawn uniformly from the idle ones            draw_nodes
    2: on the update d_i of a node that started at version t_i:   engine.Engine.update
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
    """What updates count: scales, the step of all, factors of weights (None: all weigh alike)."""

    scales: Floats
    step: float = 1.0
    factors: Floats | None = None
    # parts of the weights that were cut off: above most nodes' weights, and as too long steps
    clipped_share: float = 0.0
    bounded_share: float = 0.0


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

    Of n nodes in flight a node pays n / ``limit`` turns when it is asked; each instruction to any
    node is a turn. It may be in debt by one instruction.

    >>> turns = Turns()
    >>> for nodes in (["a", "b", "c", "d"], ["a"], ["a"]):
    ...     turns.take(nodes, cost=3.0)
    >>> turns.may_go("a", cost=3.0), turns.may_go("b", cost=3.0)
    (False, True)
    """

    given: int = 0
    paid_until: dict[str, float] = field(default_factory=dict)

    def may_go(self, node: str, cost: float) -> bool:
        """Return whether a node may be asked."""
        return self.paid_until.get(node, 0.0) <= self.given + cost

    def take(self, nodes: Sequence[str], cost: float) -> None:
        """Let these nodes pay."""
        for node in nodes:
            self.paid_until[node] = max(self.paid_until.get(node, 0.0), self.given) + cost
        self.given += len(nodes)

    def give_back(self, node: str, cost: float) -> None:
        """Let a node have its turn back, of which nothing came."""
        self.paid_until[node] = self.paid_until.get(node, 0.0) - cost


def possible_rates(rates: ArrayLike, largest_share: float) -> Floats:
    """Cut rates, (num_nodes,), to the largest share of their sum that a node may have.

    >>> possible_rates([1.0, 1.0, 1.0, 1000.0], largest_share=0.4)
    array([1., 1., 1., 2.])
    """
    own = np.asarray(rates, np.float64)
    rising = np.sort(own)
    for num_cut in range(len(own)):
        kept = rising[: len(own) - num_cut]
        if num_cut * largest_share < 1:
            most = largest_share * kept.sum() / (1 - num_cut * largest_share)
            if kept[-1] <= most:
                return np.asarray(np.minimum(own, most))
    return own


# --- weights by examples, whatever the speed: not in the paper ---------------------------------


def update_weights(
    weights: ArrayLike,
    all_weights: ArrayLike,
    replies_per_s: ArrayLike,
    most: ArrayLike = inf,
    all_most: ArrayLike | None = None,
) -> tuple[Floats, float, float]:
    r"""Weigh a buffer's updates against the mean of all replies, not that of the buffer.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_i \frac{\min(v_i, c_i)}{\bar v} d_i,
              \qquad \bar v = \frac{\sum_j r_j \min(v_j, c_j)}{\sum_j r_j}

    Node j sends :math:`r_j` replies a second: with :math:`v_j = p_j / r_j` it adds :math:`p_j d_j`.

    weights: (num_updates,), their v; all_weights, replies_per_s: (num_nodes,); most, all_most: c,
    of the updates and of the nodes; one for all, if all_most is left out -> (num_updates,), the
    step of their mean, and the share cut off.

    >>> update_weights([2.0, 2.0], [2.0, 4.0], [0.5, 0.5])[1]
    0.6666666666666666
    """
    raw = np.asarray(weights, np.float64)
    most_of_all = most if all_most is None else all_most
    counted = np.minimum(all_weights, most_of_all)
    mean = float(np.average(counted, weights=np.asarray(replies_per_s)))
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
    # one node cannot set it
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
    order, rates = np.argsort(moved), np.asarray(replies_per_s, np.float64)[known]
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
    known, most = norms > 0, max(LONGEST * usual, longest)
    return np.asarray(np.where(known, most / np.where(known, norms, 1.0), inf))
