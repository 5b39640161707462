"""Evaluations by nodes while other nodes train."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from flwr.app import Message

from flwr_hetero.exchange.context import MOST_TIMED, Exchange, late_after_s
from flwr_hetero.exchange.nodes import is_simulated
from flwr_hetero.exchange.queue import Pending, on_clock
from flwr_hetero.server.loop import Run

EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate; of each node's if it is every round."""


@dataclass
class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    context: Exchange
    waiting: dict[int, Message]
    """By node: the instruction that it gets when it is idle."""
    open: dict[int, Message] = field(default_factory=dict)
    """By node: the instruction that was sent and that is waited for."""
    replies: list[Message] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.open


class Evaluations:
    """The evaluations in flight, the oldest first: of every round, or in a tenth of the time."""

    def __init__(self, run: Run, of_each_round: bool) -> None:
        self.run = run
        self.of_each_round = of_each_round
        self.in_flight: list[Evaluation] = []
        self.zero_s = self._now_s
        # When the last evaluation began, and when its last reply came.
        self.began_s = self._now_s
        self.ended_s = self._now_s
        # By node, the time that it has evaluated for in all, and in its last evaluation.
        self.took_s: dict[int, float] = defaultdict(float)
        self.last_s: dict[int, float] = {}

    @property
    def _now_s(self) -> float:
        return self.run.fleet.clock.virtual_s

    @property
    def num_open(self) -> int:
        """Nodes that are evaluating."""
        return sum(len(each.open) for each in self.in_flight)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return all(each.is_over() for each in self.in_flight)

    def is_due(self) -> bool:
        """Return whether a model that is there now is to be evaluated."""
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.of_each_round or (self.is_over() and self._now_s >= self.ended_s + pause_s)

    def begin(self, number: int, *, is_last: bool = False) -> None:
        """Ask the strategy which nodes evaluate the model of a round."""
        run = self.run
        context = run.exchange(number)
        model = run.strategy.evaluated_model(run.arrays)
        messages = run.strategy.configure_evaluate(
            number, model, run.evaluate_config, run.grid, context
        )
        # The exchange holds the messages that are sent, and none is sent yet.
        context.messages = []
        context.overlaps = True
        self.began_s = self._now_s
        # Only the last one begins before another is over.
        if not self.of_each_round:
            self.in_flight.clear()
        for older in self.in_flight:
            older.waiting = {} if older.context.messages else older.waiting
        waiting = {message.metadata.dst_node_id: message for message in messages}
        if self.of_each_round and not is_last:
            # A node that has evaluated for more than a tenth of the time is left out.
            most_s = EVALUATION_SHARE * (self._now_s - self.zero_s)
            most_s = max(most_s, min((self.took_s[node] for node in waiting), default=0.0))
            waiting = {node: m for node, m in waiting.items() if self.took_s[node] <= most_s}
        self.in_flight.append(Evaluation(context, waiting))

    def leave_out(self, busy: Mapping[int, float], train_s: dict[int, float]) -> float:
        """Give up nodes that are late beside the others; return when the next one will be.

        ``busy``: since when nodes are; ``train_s``: how long the last training of each took, the
        latest at the end.
        """
        fleet = self.run.fleet
        next_s = inf
        is_real = not is_simulated(self.run.grid)
        trains_s = late_after_s(latest(train_s), fleet.late_limit, is_real=is_real)
        lasts_s = late_after_s(latest(self.last_s), fleet.late_limit, is_real=is_real)
        for each in self.in_flight:
            for node, since_s in busy.items():
                if node in each.waiting:
                    late_s = on_clock(since_s + trains_s)
                elif node in each.open:
                    late_s = on_clock(since_s + lasts_s)
                else:
                    continue
                if late_s > self._now_s:
                    next_s = min(next_s, late_s)
                elif node in each.waiting:
                    del each.waiting[node]
                else:
                    del each.open[node]
                    each.context.late_s = lasts_s
        return next_s

    def hurry(self) -> None:
        """Wait for no node that still trains, if half of the nodes have been asked."""
        for each in self.in_flight:
            if len(each.context.messages) >= len(each.waiting):
                each.waiting.clear()

    def messages_for(self, idle: Sequence[int], busy: Set[int]) -> list[Message]:
        """Return the instructions for idle nodes, one for each, which are then in flight.

        ``idle`` is sorted. It is searched and not copied, since it may be a large fleet.
        """
        messages: dict[int, Message] = {}
        for each in self.in_flight:
            free = sorted(node for node in each.waiting if is_among(idle, node))
            sent = {node: each.waiting[node] for node in free if node not in messages}
            # Nodes that are gone, or backed off after a failure, are not waited for.
            kept = busy | messages.keys()
            each.waiting = {node: m for node, m in each.waiting.items() if node in kept}
            each.context.messages += sent.values()
            each.open |= sent
            messages |= sent
        return list(messages.values())

    def receive(self, pending: Pending, reply: Message | None) -> None:
        """Take a reply to an evaluation, or the lack of one."""
        took_s = self._now_s - pending.sent_s
        self.took_s[pending.node_id] += took_s
        # An error comes at once and tells nothing of how long others may take.
        if reply is not None and reply.has_content():
            self.last_s.pop(pending.node_id, None)
            self.last_s[pending.node_id] = took_s
        for each in self.in_flight:
            if each.open.get(pending.node_id) is pending.instruction:
                del each.open[pending.node_id]
                each.replies += [] if reply is None else [reply]
                self.ended_s = self._now_s

    def results(self) -> dict[str, Any]:
        """Return the figures of the newest evaluation that is over, of each once."""
        found: dict[str, Any] = {}
        for each in [each for each in self.in_flight if each.is_over()]:
            self.in_flight.remove(each)
            if not each.context.messages:
                continue
            number = each.context.round
            strategy = self.run.strategy
            metrics = strategy.aggregate_evaluate(number, each.replies, each.context)
            if metrics is not None:
                self.run.result.evaluate_metrics_clientapp[number] = metrics
                found = {**metrics, "evaluated_round": number}
        return found


def latest(times_s: dict[int, float]) -> list[float]:
    """Return the times that were added last."""
    return list(islice(reversed(times_s.values()), MOST_TIMED))


def is_among(nodes: Sequence[int], node: int) -> bool:
    """Return whether a node is among sorted ones."""
    place = bisect_left(nodes, node)
    return place < len(nodes) and nodes[place] == node
