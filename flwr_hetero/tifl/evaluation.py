"""Federated evaluation: that of the wrapped strategy, and the accuracy of each tier."""

from collections.abc import Mapping, Set
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_hetero._flwr import log
from flwr_hetero.records import read_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import online_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.tifl.algorithm import ADAPTIVE, ALGORITHM_2, Available, Floats, TierState
from flwr_hetero.tifl.latencies import Latencies
from flwr_hetero.tifl.tiers import Tiers


class TierEvaluation(Selection):
    """Evaluate on the nodes that the wrapped strategy would ask alone, those in flight left out.

    The tiers' accuracies are those of the same nodes each time, which are asked even if the wrapped
    strategy leaves them out, in the rounds whose accuracies count.
    """

    named: str
    interval: int
    tiers: Tiers
    state: TierState
    timing: Latencies
    evaluated: Floats | None = None
    """Accuracies that the next round's draw goes by."""
    _panel: Set[int] = frozenset()
    _further: Set[int] = frozenset()
    _trained: Set[str] = frozenset()

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Return all free nodes; where only TiFL needs figures, the same of every tier."""
        online = online_nodes(grid)
        if not self._inner_evaluates:
            return self.tiers.panel(self._available(online)) if self._is_due(context.round) else []
        in_flight, blocked = self.fleet.nodes.in_flight, self.timing.blocked
        free = [node for node in online if node not in in_flight]
        if blocked:
            free = [node for node in free if self.identity(node) not in blocked]
        # as many as it would ask alone, if so many are free
        leaf: Any = self.leaf
        leaf.min_evaluate_nodes = min(self._min_evaluate_nodes, len(free))
        return free

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        context: Exchange | None = None,
    ) -> list[Message]:
        """Ask further nodes, for TiFL alone, where the wrapped strategy leaves out some of them."""
        messages = super().configure_evaluate(server_round, arrays, config, grid, context)
        self._further = frozenset()
        if messages and self._is_due(server_round):
            # l. 21: for each tier, of the same nodes each time
            self._panel = set(self.tiers.panel(self._available(online_nodes(grid))))
            self._further = self._panel - {message.metadata.dst_node_id for message in messages}
            like: Any = messages[0].content
            for node_id in sorted(self._further):
                own = [n for n in like if n not in like.array_records]
                content = RecordDict({**like, **{n: type(like[n])(dict(like[n])) for n in own}})
                messages.append(Message(content, node_id, messages[0].metadata.message_type))
            if self._further and self.outer is None:
                self.current(context).ask(messages, grid)
        return messages

    def on_evaluate_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn the tiers' accuracies when they are due."""
        if self._is_due(context.round):
            # l. 22
            reported = {
                self.identity(reply.metadata.src_node_id): metrics
                for reply in replies
                for metrics in list(reply.content.metric_records.values())[:1]
                if reply.metadata.src_node_id in self._panel
            }
            weight_key = getattr(self.leaf, "weighted_by_key", "num-examples")
            self.evaluated = accuracy_per_tier(reported, self.tiers, weight_key)
        return [reply for reply in replies if reply.metadata.src_node_id not in self._further]

    def on_evaluate_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Count failures of nodes that only evaluate."""
        # if no node can, it may be the ClientApp
        if good:
            self.timing.count("evaluate", good, sorted(set(failed) - self._trained))

    def _is_due(self, server_round: int) -> bool:
        if self.named not in (ADAPTIVE, ALGORITHM_2) or not self.tiers.latency:
            return False
        first = self.named == ALGORITHM_2 and bool(np.isnan(self.state.accuracy).all())
        # l. 3
        return first or server_round % self.interval == 0

    def _available(self, online: Set[int]) -> Available:
        nodes, blocked = self.fleet.nodes, self.timing.blocked

        def available(identity: str) -> int | None:
            node_id = nodes.find(identity)
            free = node_id in online and node_id not in nodes.in_flight and identity not in blocked
            return node_id if free else None

        return available


def accuracy_per_tier(
    reported: Mapping[str, MetricRecord], tiers: Tiers, weight_key: str
) -> Floats:
    """Average the reported accuracy of each tier, weighted by examples; NaN where unknown."""
    found = [(name, accuracy_of(record), record) for name, record in reported.items()]
    known = [row for row in found if row[0] in tiers.tier and not np.isnan(row[1])]
    if reported and not known:
        text = "TiFL: none of the evaluation's metrics %s has 'acc' or 'loss' in its name"
        log(WARNING, text, sorted(next(iter(reported.values()))))
    total, weight = np.zeros((2, len(tiers.members)))
    for name, accuracy, metrics in known:
        examples = read_number(metrics, weight_key, 1)
        total[tiers.tier[name]] += accuracy * examples
        weight[tiers.tier[name]] += examples
    with np.errstate(invalid="ignore"):
        return np.asarray(total / weight)


def accuracy_of(metrics: MetricRecord) -> float:
    """Read the metric that says how good the model is, more is better; NaN if it says nothing."""
    for part, sign in (("acc", 1.0), ("loss", -1.0)):
        for name in metrics:
            if part in name.lower():
                return sign * read_number(metrics, name)
    return np.nan
