"""Evaluations on nodes beside training."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MessageType

from flwr_hetero.asynchronous.message_queue import Pending
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.rounds import Run

EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate; of each node's if it is every round."""


@dataclass
class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    context: Exchange
    """Its messages are those that were sent."""
    waiting: dict[int, Message]
    num_open: int = 0
    replies: list[Message] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.num_open


class Evaluations:
    """The evaluations in flight, the oldest first.

    Of every round's model, or of one where a tenth of the time has gone by without. If of every
    round's, a node is left out that has evaluated for more than a tenth of the time.
    """

    def __init__(self, run: Run, of_each_round: bool) -> None:
        self.run, self.of_each_round = run, of_each_round
        self.in_flight: list[Evaluation] = []
        self.began_s = self.ended_s = self.zero_s = self._now_s
        self.took_s: dict[int, float] = defaultdict(float)

    @property
    def _now_s(self) -> float:
        return self.run.fleet.clock.virtual_s

    @property
    def num_open(self) -> int:
        """Nodes that are evaluating."""
        return sum(each.num_open for each in self.in_flight)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return all(each.is_over() for each in self.in_flight)

    def is_due(self) -> bool:
        """Return whether a model that is there now is to be evaluated."""
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.of_each_round or (self.is_over() and self._now_s >= self.ended_s + pause_s)

    def begin(self, number: int, *, is_last: bool = False) -> None:
        """Ask the strategy which nodes evaluate the model of a round."""
        run, context = self.run, self.run.exchange(number)
        how = number, run.arrays, run.evaluate_config, run.grid
        messages = run.strategy.configure_evaluate(*how, context)
        context.messages, context.overlaps, self.began_s = [], True, self._now_s
        if not self.of_each_round:  # only the last one begins before another is over
            self.in_flight.clear()
        for older in self.in_flight:
            older.waiting = {} if older.context.messages else older.waiting
        took_s = {m.metadata.dst_node_id: self.took_s[m.metadata.dst_node_id] for m in messages}
        most_s = EVALUATION_SHARE * (self._now_s - self.zero_s)
        most_s = max(most_s, min(took_s.values(), default=0.0))
        asks_all = is_last or not self.of_each_round
        waiting = {message.metadata.dst_node_id: message for message in messages}
        waiting = {node: m for node, m in waiting.items() if asks_all or took_s[node] <= most_s}
        self.in_flight.append(Evaluation(context, waiting))

    def messages_for(self, idle: Sequence[int], busy: Collection[int]) -> list[Message]:
        """Return the instructions for idle nodes, one for each, which are then in flight."""
        messages: list[Message] = []
        free, there = list(idle), {*idle, *busy} if self.in_flight else {}
        for each in self.in_flight:
            # nodes that are gone, or backed off after a failure, are not waited for
            each.waiting = {node: m for node, m in each.waiting.items() if node in there}
            own = [each.waiting.pop(node) for node in free if node in each.waiting]
            each.context.messages += own
            each.num_open += len(own)
            messages += own
            taken = {message.metadata.dst_node_id for message in own}
            free = [node for node in free if node not in taken]
        return messages

    def receive(self, pending: Pending, reply: Message | None) -> bool:
        """Take a reply, or the lack of one, if it is to an evaluation; return whether it was."""
        if pending.instruction.metadata.message_type != MessageType.EVALUATE:
            return False
        self.took_s[pending.node_id] += self._now_s - pending.sent_s
        for each in self.in_flight:
            if any(message is pending.instruction for message in each.context.messages):
                each.num_open -= 1
                each.replies += [] if reply is None else [reply]
                self.ended_s = self._now_s
        return True

    def results(self) -> dict[str, Any]:
        """Return the figures of the newest evaluation that is over, of each once."""
        found: dict[str, Any] = {}
        for each in [each for each in self.in_flight if each.is_over()]:
            self.in_flight.remove(each)
            if not each.context.messages:
                continue
            number, strategy = each.context.round, self.run.strategy
            metrics = strategy.aggregate_evaluate(number, each.replies, each.context)
            if metrics is not None:
                self.run.result.evaluate_metrics_clientapp[number] = metrics
                found = {**metrics, "evaluated-round": number}
        return found
