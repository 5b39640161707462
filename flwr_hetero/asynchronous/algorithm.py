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

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_choice, check_number

Floats = NDArray[np.float64]
_Item = TypeVar("_Item")

MEMORY, PRIOR, USUAL_IDLE = 10, 5, 0.25
"""Replies over which a node's means are taken; idle times that this quantile of all stands for."""
IDLE_MEMORY, IDLE_OUTLIER = 20, 3.0
"""Idle times over which their mean is taken, and what one counts at most, in mean intervals."""
OUTLIER, SHORTEST_S = 10.0, 1e-3
"""What an interval between two replies counts at most, in mean ones, and at least, in seconds."""
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


@dataclass
class ReplyMeans:
    """Running means of a node's last replies, and of more idle times.

    >>> ReplyMeans(age_s=5.0).interval_s(idle_s=1.0)
    6.0
    """

    weight: float = 0.0
    age_s: float = 0.0
    discount: float = 1.0
    count: int = 0
    idle_s: float = 0.0
    starts: int = 0

    def add(self, weight: float, age_s: float, idle_s: float | None, discount: float) -> None:
        """Add a reply."""
        self.count = min(self.count + 1, MEMORY)
        # a time counts as ten usual ones at most, as after an absence
        longest_s = OUTLIER * self.age_s if self.count > 1 else inf
        age_s = min(max(age_s, SHORTEST_S), longest_s)
        self.weight += (weight - self.weight) / self.count
        self.age_s += (age_s - self.age_s) / self.count
        self.discount += (discount - self.discount) / self.count
        if idle_s is not None:
            self.starts += 1
            longest_s = IDLE_OUTLIER * (self.age_s + self.idle_s) if self.starts > MEMORY else inf
            self.idle_s += (min(idle_s, longest_s) - self.idle_s) / min(self.starts, IDLE_MEMORY)

    def interval_s(self, idle_s: float) -> float:
        """Return the time from reply to reply; ``idle_s`` is that of a node without any reply."""
        # idle nodes are drawn uniformly: a few of a node's own idle times are but noise
        return self.age_s + (PRIOR * idle_s + self.starts * self.idle_s) / (PRIOR + self.starts)


class RateCorrection:
    r"""Weights :math:`p_i^a \, r_i^{-b}`, which undo how often each node replies.

    Powers are (a, b), p a node's weight, r its rate.

    >>> RateCorrection((1.0, 0.0)).undoes_rate
    False
    """

    def __init__(self, powers: tuple[float, float]) -> None:
        self.powers, self.undoes_rate = powers, powers[1] > 0
        self.means: dict[str, ReplyMeans] = {}
        self.last_reply_s: dict[str, float] = {}
        # of a node in all replies; None: any
        self.largest_share: float | None = None
        # of nodes' last updates, and whether far longer ones than most count less
        self.lengths: dict[str, float] = {}
        self.bounds_lengths = True
        # the most by which most replies have moved the model; while few nodes are known, a bad one
        # may be most of them
        self.usual, self.remembers = 0.0, True

    def learn(
        self, node: str, weight: float, sent_s: float, arrived_s: float, discount: float
    ) -> None:
        """Learn from a reply how long its node was in flight and idle, and what it counts."""
        before_s = self.last_reply_s.get(node)
        idle_s = None if before_s is None else max(0.0, sent_s - before_s)
        self.last_reply_s[node] = arrived_s
        self.means.setdefault(node, ReplyMeans()).add(weight, arrived_s - sent_s, idle_s, discount)

    def weigh(self, nodes: Sequence[str], weights: Sequence[float], discounts: Floats) -> Shares:
        """Weigh updates of these nodes, which it has seen."""
        (a, b), intervals_s = self.powers, self._intervals_s()
        all_s = np.array(list(intervals_s.values()))
        every = np.array([means.weight for means in self.means.values()]) ** a * all_s**b
        most = largest_weight(every) if self.undoes_rate else inf
        if self.undoes_rate:
            # only what is staler than usual for its node is weighed down, or slow ones count less
            own = np.array([self.means[node].discount for node in nodes])
            discounts = np.asarray(self.mean_discount() * discounts / own)
        raw = np.power(weights, a) * np.power([intervals_s[node] for node in nodes], b)
        found, step, clipped_share = update_weights(raw, every, 1 / all_s, most)
        cut_share = clipped_share
        if self.undoes_rate and self.lengths and self.bounds_lengths:
            # one step of a slow node counts for many, and would move the model at random
            lengths = [self.lengths.get(node, 0.0) for node in self.means]
            now = usual_contribution(every, lengths, 1 / all_s)
            if self.remembers:
                self.usual = max(self.usual, now)
            by_length = np.minimum(most, weights_by_length(lengths, now, self.usual))
            most_of = dict(zip(self.means, by_length.tolist(), strict=True))
            bounds = [most_of[node] for node in nodes], by_length
            found, step, cut_share = update_weights(raw, every, 1 / all_s, *bounds)
        factors = found / np.where(weights, weights, 1.0)
        return Shares(discounts, step, factors, clipped_share, cut_share - clipped_share)

    def mean_discount(self) -> float:
        """Return the mean discount of stale updates over all replies."""
        every = [means.discount for means in self.means.values()]
        return float(np.average(every, weights=[1 / s for s in self._intervals_s().values()]))

    def _intervals_s(self) -> dict[str, float]:
        """Return the mean time between each node's replies."""
        # fast nodes rest longer than others, which tells nothing of a node with few replies
        known = [means.idle_s for means in self.means.values() if means.starts]
        idle_s = float(np.quantile(known, USUAL_IDLE)) if known else 0.0
        every = {node: means.interval_s(idle_s) for node, means in self.means.items()}
        if self.largest_share is None:
            return every
        # a node that has just begun may seem quicker than it may be
        share = max(self.largest_share, NODE_LIMIT / len(every))
        rates = possible_rates([1 / s for s in every.values()], share)
        return dict(zip(every, (1 / rates).tolist(), strict=True))

    def to_str(self) -> str:
        """Write what it knows as JSON."""
        means = {node: asdict(each) for node, each in self.means.items()}
        return json.dumps([means, self.last_reply_s, self.lengths, self.usual])

    def load_str(self, text: str) -> None:
        """Take up what :meth:`to_str` wrote."""
        # Version 0.1 has neither lengths nor what is usual.
        saved = json.loads(text)
        means, self.last_reply_s, self.lengths, self.usual = saved + [{}, 0.0][len(saved) - 2 :]
        self.means = {node: ReplyMeans(**each) for node, each in means.items()}
