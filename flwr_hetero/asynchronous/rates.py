"""How often each node replies, and weights that undo it: not in FedBuff's paper."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf

import numpy as np

from flwr_hetero.asynchronous.algorithm import (
    NODE_LIMIT,
    Floats,
    Shares,
    largest_weight,
    possible_rates,
    update_weights,
    usual_contribution,
    weights_by_length,
)

MEMORY, PRIOR, USUAL_IDLE = 10, 5, 0.25
"""Replies over which a node's means are taken; idle times that this quantile of all stands for."""
IDLE_MEMORY, IDLE_OUTLIER = 20, 3.0
"""Idle times over which their mean is taken, and what one counts at most, in mean intervals."""
OUTLIER, SHORTEST_S = 10.0, 1e-3
"""What an interval between two replies counts at most, in mean ones, and at least, in seconds."""


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
        # The most by which most replies have moved the model, in weights of a mean reply. While few
        # nodes are known, a bad one may be most of them.
        self.usual, self.remembers = 0.0, True
        # Whether nodes are asked in turn, so that all reply equally often, whatever a reply takes.
        self.in_turn = False

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
            # Intervals may become much shorter after a slow start, and all weights with them.
            mean = float(np.average(np.minimum(every, most), weights=1 / all_s)) or 1.0
            if self.remembers:
                self.usual = max(self.usual, now / mean)
            by_length = np.minimum(most, weights_by_length(lengths, now, self.usual * mean))
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
        if self.in_turn:
            return dict.fromkeys(self.means, 1.0)
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
