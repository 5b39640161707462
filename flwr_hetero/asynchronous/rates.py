"""How often each node replies, and weights that undo it: not in FedBuff's paper."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from flwr_hetero.asynchronous.algorithm import (
    NODE_LIMIT,
    Floats,
    Shares,
    largest_rate,
    largest_weight,
    mean_weight,
    update_weights,
    usual_contribution,
    weights_by_length,
)
from flwr_hetero.exchange.nodes import Figure

MEMORY = 10
"""Replies over which a node's means are taken."""
USUAL_IDLE = 0.25
"""Quantile of all nodes' idle times that counts as usual."""
PRIOR = 5
"""Number of a node's own idle times that the usual one stands for."""
IDLE_MEMORY = 20
"""Idle times over which their mean is taken."""
IDLE_OUTLIER = 3.0
"""Largest idle time that counts, in mean intervals between two replies."""
OUTLIER = 10.0
"""Largest interval between two replies that counts, in mean intervals."""
SHORTEST_S = 1e-3
"""Smallest interval between two replies that counts, in seconds."""


class Conditions(NamedTuple):
    """What is known of the nodes beside their replies."""

    largest_share: float | None = None
    """Largest share of one node in all replies; None: there is no limit."""
    in_turn: bool = False
    """Whether nodes are asked in turn, so that all reply equally often, whatever a reply takes."""
    bounds_lengths: bool = True
    """Whether updates that are far longer than most count less."""
    remembers: bool = True
    """Whether it counts how far updates have moved the model before.

    While few nodes are known, a bad one may be most of them."""


USUAL_CONDITIONS = Conditions()


@dataclass
class ReplyMeans:
    """Running means of a node's last replies, and of more idle times."""

    weight: float = 0.0
    age_s: float = 0.0
    discount: float = 1.0
    count: int = 0
    idle_s: float = 0.0
    starts: int = 0

    def add(self, weight: float, age_s: float, idle_s: float | None, discount: float) -> None:
        """Add a reply."""
        self.count = min(self.count + 1, MEMORY)
        # After an absence, a time counts as ten usual ones at most.
        longest_s = OUTLIER * self.age_s if self.count > 1 else inf
        age_s = min(max(age_s, SHORTEST_S), longest_s)
        self.weight += (weight - self.weight) / self.count
        self.age_s += (age_s - self.age_s) / self.count
        self.discount += (discount - self.discount) / self.count
        if idle_s is not None:
            self.starts += 1
            longest_s = IDLE_OUTLIER * (self.age_s + self.idle_s) if self.starts > MEMORY else inf
            self.idle_s += (min(idle_s, longest_s) - self.idle_s) / min(self.starts, IDLE_MEMORY)


class MeansOfNodes(NamedTuple):
    """The running means of several nodes; each of shape (num_nodes,).

    >>> MeansOfNodes.of([ReplyMeans(age_s=5.0)]).intervals_s(usual_idle_s=1.0)
    array([6.])
    """

    weight: Floats
    age_s: Floats
    discount: Floats
    idle_s: Floats
    starts: Floats

    @classmethod
    def of(cls, means: Collection[ReplyMeans]) -> "MeansOfNodes":
        """Put the means of some nodes into arrays."""
        rows = [(m.weight, m.age_s, m.discount, m.idle_s, m.starts) for m in means]
        return cls(*np.array(rows, np.float64).T)

    def intervals_s(self, usual_idle_s: float) -> Floats:
        """Return the times from reply to reply; a node without any reply rests the usual time."""
        # Idle nodes are drawn uniformly, so that a few of a node's own idle times are only noise.
        rested_s = PRIOR * usual_idle_s + self.starts * self.idle_s
        return self.age_s + rested_s / (PRIOR + self.starts)


class AllReplies(NamedTuple):
    """What is usual of the replies of all nodes."""

    idle_s: float
    """The idle time of a node with few replies."""
    in_turn: bool = False
    """Whether all nodes reply equally often."""
    largest_rate: float = inf
    """The most replies of one node in a second."""
    discount: float = 1.0
    """The mean discount of stale updates."""
    most: float = inf
    """The largest weight of an update."""
    weight: float = 1.0
    """The mean weight of a reply."""
    bounds_lengths: bool = False
    """Whether long updates count less, which the following say."""
    usual: float = 0.0
    """By how much most replies move the model."""
    longest: float = 0.0
    """The most by which most replies have ever moved the model."""
    bounded_weight: float = 1.0
    """The mean weight of a reply where long updates count less."""

    def intervals_s(self, means: MeansOfNodes) -> Floats:
        """Return the mean times between the replies of some nodes; shape (num_nodes,)."""
        if self.in_turn:
            return np.ones(len(means.age_s))
        intervals_s = means.intervals_s(self.idle_s)
        if self.largest_rate < inf:
            return np.asarray(1 / np.minimum(1 / intervals_s, self.largest_rate))
        return intervals_s

    def weights_by_length(self, lengths: Sequence[float]) -> Floats:
        """Return the largest weights of updates of these lengths; shape (len(lengths),)."""
        return weights_by_length(lengths, self.usual, self.longest)


class RateCorrection:
    r"""Weights :math:`p_i^a \, r_i^{-b}`, which undo how often each node replies.

    Powers are (a, b), p a node's weight, r its rate.

    >>> RateCorrection((1.0, 0.0)).undoes_rate
    False
    """

    def __init__(self, powers: tuple[float, float]) -> None:
        self.powers = powers
        self.undoes_rate = powers[1] > 0
        # By node: the means of its replies, the time of the last one, and its update's length.
        self.means: dict[str, ReplyMeans] = {}
        self.last_reply_s: dict[str, float] = {}
        self.lengths: dict[str, float] = {}
        # The most by which most replies have moved the model, in weights of a mean reply.
        self.usual = 0.0
        # The longest time of a reply that was not the first one of its node.
        self._longest_s = 0.0
        self._num_replies = 0
        self._of_all = Figure[AllReplies]()

    def learn(
        self,
        node: str,
        weight: float,
        sent_s: float,
        arrived_s: float,
        discount: float,
        *,
        loads: bool = False,
    ) -> None:
        """Learn from a reply how long its node trained and rested, and what it counts.

        ``loads``: the first reply of a node contains the time in which it loads the app.
        """
        before_s = self.last_reply_s.get(node)
        idle_s = None if before_s is None else max(0.0, sent_s - before_s)
        self.last_reply_s[node] = arrived_s
        means = self.means.setdefault(node, ReplyMeans())
        age_s = arrived_s - sent_s
        if means.count:
            self._longest_s = max(self._longest_s, age_s)
        elif loads and self._longest_s:
            # A slow node loads the app for minutes, and its first update would weigh too much.
            age_s = min(age_s, self._longest_s)
        if loads and means.count == 1:
            # The time of the first reply no longer counts.
            means.age_s = max(age_s, SHORTEST_S)
        means.add(weight, age_s, idle_s, discount)
        self._num_replies += 1

    def weigh(
        self,
        nodes: Sequence[str],
        weights: Sequence[float],
        discounts: Floats,
        conditions: Conditions = USUAL_CONDITIONS,
    ) -> Shares:
        """Weigh updates of these nodes, which it has seen."""
        of_all = self._of_all.of(
            lambda: self._look_at_all(conditions),
            self._num_replies,
            len(self.means),
            key=(conditions, bool(self.lengths)),
        )
        means = MeansOfNodes.of([self.means[node] for node in nodes])
        if self.undoes_rate:
            # Only what is staler than usual for its node is weighed down, or slow ones count less.
            discounts = np.asarray(of_all.discount * discounts / means.discount)
        weight_power, interval_power = self.powers
        intervals_s = of_all.intervals_s(means)
        raw = np.power(weights, weight_power) * np.power(intervals_s, interval_power)
        counted, step, clipped_share = update_weights(raw, of_all.weight, of_all.most)
        cut_share = clipped_share
        if of_all.bounds_lengths:
            lengths = [self.lengths.get(node, 0.0) for node in nodes]
            bounds = np.minimum(of_all.most, of_all.weights_by_length(lengths))
            counted, step, cut_share = update_weights(raw, of_all.bounded_weight, bounds)
        factors = counted / np.where(weights, weights, 1.0)
        bounded_share = cut_share - clipped_share
        return Shares(discounts, step, factors, clipped_share, bounded_share, of_all.discount)

    def _look_at_all(self, conditions: Conditions) -> "AllReplies":
        """Return what is usual of the replies of all nodes."""
        means = MeansOfNodes.of(self.means.values())
        # Fast nodes rest longer than others, which tells nothing of a node with few replies.
        idle_s = means.idle_s[means.starts > 0]
        usual_idle_s = float(np.quantile(idle_s, USUAL_IDLE)) if len(idle_s) else 0.0
        of_all = AllReplies(usual_idle_s, in_turn=conditions.in_turn)
        if conditions.largest_share is not None and not conditions.in_turn:
            # A node that has just begun may seem faster than it can be.
            share = max(conditions.largest_share, NODE_LIMIT / len(self.means))
            possible = 1 / means.intervals_s(usual_idle_s)
            of_all = of_all._replace(largest_rate=largest_rate(possible, share))
        weight_power, interval_power = self.powers
        intervals_s = of_all.intervals_s(means)
        rates = 1 / intervals_s
        weights = means.weight**weight_power * intervals_s**interval_power
        most = largest_weight(weights) if self.undoes_rate else inf
        of_all = of_all._replace(
            discount=float(np.average(means.discount, weights=rates)),
            most=most,
            weight=mean_weight(weights, rates, most),
        )
        if not (self.undoes_rate and self.lengths and conditions.bounds_lengths):
            return of_all
        # One step of a slow node counts for many, and would move the model at random.
        lengths = [self.lengths.get(node, 0.0) for node in self.means]
        usual = usual_contribution(weights, lengths, rates)
        # Intervals may become much shorter after a slow start, and all weights with them.
        unit = of_all.weight or 1.0
        if conditions.remembers:
            self.usual = max(self.usual, usual / unit)
        of_all = of_all._replace(bounds_lengths=True, usual=usual, longest=self.usual * unit)
        bounds = np.minimum(most, of_all.weights_by_length(lengths))
        return of_all._replace(bounded_weight=mean_weight(weights, rates, bounds))

    def to_str(self) -> str:
        """Write what it knows as JSON."""
        means = {node: asdict(each) for node, each in self.means.items()}
        return json.dumps([means, self.last_reply_s, self.lengths, self.usual, self._longest_s])

    def load_str(self, text: str) -> None:
        """Take up what :meth:`to_str` wrote."""
        means, self.last_reply_s, self.lengths, self.usual, *longest_s = json.loads(text)
        # Earlier versions did not save it.
        self._longest_s = max(longest_s, default=0.0)
        self.means = {node: ReplyMeans(**each) for node, each in means.items()}
        self._num_replies += len(means) + 1
