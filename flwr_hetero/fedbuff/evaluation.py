"""An evaluation on nodes beside training."""

from collections.abc import Sequence, Set
from typing import Any

from flwr.app import Message, MessageType

from flwr_hetero.fedbuff.mail import Sent
from flwr_hetero.server.exchange import Exchange
from flwr_hetero.server.rounds import Run

EVALUATION_SHARE = 0.1
"""Part of the time in which nodes are asked to evaluate."""


class Evaluation:
    """Nodes evaluate a version of the model when they are idle next, while training goes on."""

    def __init__(self, run: Run) -> None:
        self.run, self.session = run, run.strategy.session
        self.number = 0
        self.waiting: dict[int, Message] = {}
        self.sent: list[Message] = []
        self.num_open = 0
        self.replies: list[Message] = []
        self.began_s = self.ended_s = self.session.clock.virtual_s

    def is_over(self) -> bool:
        """Return whether no node has to answer any more."""
        return not self.waiting and not self.num_open

    def is_due(self) -> bool:
        """Return whether the last one is over and was long enough ago."""
        pause_s = (self.ended_s - self.began_s) * (1 / EVALUATION_SHARE - 1)
        return self.is_over() and self.session.clock.virtual_s >= self.ended_s + pause_s

    def begin(self, number: int) -> None:
        """Ask the strategy which nodes evaluate the model of a merge."""
        run, exchange = self.run, self.session.exchange
        messages = run.strategy.configure_evaluate(
            number, run.arrays, run.evaluate_config, run.grid
        )
        self.session.exchange = exchange
        self.number, self.began_s = number, self.session.clock.virtual_s
        self.sent, self.replies, self.num_open = [], [], 0
        self.waiting = {message.metadata.dst_node_id: message for message in messages}

    def keep(self, nodes: Set[int]) -> None:
        """Wait no more for nodes that are gone, or left alone after a failure."""
        if not nodes >= self.waiting.keys():
            self.waiting = {node: m for node, m in self.waiting.items() if node in nodes}

    def messages_for(self, idle: Sequence[int]) -> list[Message]:
        """Return the instructions for idle nodes, which are then under way."""
        messages = [self.waiting.pop(node) for node in idle if node in self.waiting]
        self.sent += messages
        self.num_open += len(messages)
        return messages

    def receive(self, sent: Sent, reply: Message | None) -> bool:
        """Take a reply, or the lack of one, if it is to an evaluation; return whether it was."""
        if sent.instruction.metadata.message_type != MessageType.EVALUATE:
            return False
        if not any(message is sent.instruction for message in self.sent):
            return True  # of an evaluation that was given up for the last one
        self.num_open -= 1
        if reply is not None:
            self.replies.append(reply)
        self.ended_s = self.session.clock.virtual_s
        return True

    def result(self) -> dict[str, Any]:
        """Return the figures of an evaluation that is over, once."""
        if not self.sent or not self.is_over():
            return {}
        run, exchange = self.run, self.session.exchange
        now = Exchange(self.sent, exchange.simulated, exchange.timeout_s, quorum=exchange.quorum)
        self.session.exchange = now
        metrics = run.strategy.aggregate_evaluate(self.number, self.replies)
        self.session.exchange, self.sent = exchange, []
        if metrics is None:
            return {}
        run.result.evaluate_metrics_clientapp[self.number] = metrics
        return {**metrics, "evaluated-round": self.number}
