"""Evaluations on nodes beside training."""

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

from flwr.app import Message, MessageType

from flwr_hetero.asynchronous.mail import Sent
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.rounds import Run

EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate; of each node's if it is every round."""


class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    def __init__(self, context: Exchange, messages: Sequence[Message]) -> None:
        self.context = context
        self.waiting = {message.metadata.dst_node_id: message for message in messages}
        self.sent: list[Message] = []
        self.num_open = 0
        self.replies: list[Message] = []

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.num_open

    def keep(self, nodes: Set[int]) -> None:
        """Wait no more for nodes that are gone, or left alone after a failure."""
        if not nodes >= self.waiting.keys():
            self.waiting = {node: m for node, m in self.waiting.items() if node in nodes}

    def result(self, run: Run) -> dict[str, Any]:
        """Return the figures of an evaluation that is over."""
        context, number = self.context, self.context.round
        context.messages = self.sent
        metrics = run.strategy.aggregate_evaluate(number, self.replies, context)
        if metrics is None:
            return {}
        run.result.evaluate_metrics_clientapp[number] = metrics
        return {**metrics, "evaluated-round": number}


class Evaluations:
    """The evaluations under way, the oldest first.

    Of every round's model, or of one where a tenth of the time has gone by without. If of every
    round's, a node is left out that has evaluated for more than a tenth of the time.
    """

    def __init__(self, run: Run, of_each_round: bool) -> None:
        self.run, self.of_each_round = run, of_each_round
        self.under_way: list[Evaluation] = []
        self.began_s = self.ended_s = self.zero_s = run.fleet.clock.virtual_s
        self.took_s: dict[int, float] = defaultdict(float)

    @property
    def num_open(self) -> int:
        """Nodes that are evaluating."""
        return sum(each.num_open for each in self.under_way)

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return all(each.is_over() for each in self.under_way)

    def is_due(self) -> bool:
        """Return whether a model that is there now is to be evaluated."""
        if self.of_each_round:
            return True
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.is_over() and self._now_s >= self.ended_s + pause_s

    @property
    def _now_s(self) -> float:
        return self.run.fleet.clock.virtual_s

    def begin(self, number: int, *, is_last: bool = False) -> None:
        """Ask the strategy which nodes evaluate the model of a round."""
        run, context = self.run, self.run.exchange(number)
        how = number, run.arrays, run.evaluate_config, run.grid
        messages = run.strategy.configure_evaluate(*how, context)
        self.began_s = self._now_s
        if self.of_each_round:
            for older in self.under_way:
                older.waiting = {} if older.sent else older.waiting
        else:  # only the last one begins before another is over
            self.under_way.clear()
        if self.of_each_round and not is_last:
            messages = self._rested(messages)
        self.under_way.append(Evaluation(context, messages))

    def _rested(self, messages: list[Message]) -> list[Message]:
        """Return the messages to nodes that have evaluated little so far, or least of all."""
        most_s = EVALUATION_SHARE * (self._now_s - self.zero_s)
        took_s = [self.took_s[message.metadata.dst_node_id] for message in messages]
        most_s = max(most_s, min(took_s, default=0.0))
        return [m for m, own_s in zip(messages, took_s, strict=True) if own_s <= most_s]

    def keep(self, nodes: Set[int]) -> None:
        """Wait no more for nodes that are gone, or left alone after a failure."""
        for each in self.under_way:
            each.keep(nodes)

    def messages_for(self, idle: Sequence[int]) -> list[Message]:
        """Return the instructions for idle nodes, one for each, which are then under way."""
        messages: list[Message] = []
        free = list(idle)
        for each in self.under_way:
            own = [each.waiting.pop(node) for node in free if node in each.waiting]
            each.sent += own
            each.num_open += len(own)
            messages += own
            taken = {message.metadata.dst_node_id for message in own}
            free = [node for node in free if node not in taken]
        return messages

    def receive(self, sent: Sent, reply: Message | None) -> bool:
        """Take a reply, or the lack of one, if it is to an evaluation; return whether it was."""
        if sent.instruction.metadata.message_type != MessageType.EVALUATE:
            return False
        self.took_s[sent.node_id] += self._now_s - sent.sent_s
        for each in self.under_way:
            if any(message is sent.instruction for message in each.sent):
                each.num_open -= 1
                each.replies += [] if reply is None else [reply]
                self.ended_s = self._now_s
        return True

    def results(self) -> dict[str, Any]:
        """Return the figures of the newest evaluation that is over, of each once."""
        found: dict[str, Any] = {}
        for each in [each for each in self.under_way if each.is_over()]:
            self.under_way.remove(each)
            found = (each.result(self.run) if each.sent else {}) or found
        return found
