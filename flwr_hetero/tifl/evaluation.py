"""Federated evaluation: that of the wrapped strategy, and the accuracy of each tier."""

from collections.abc import Mapping, Sequence, Set
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.records import own_records, read_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import TIMES, Contract
from flwr_hetero.server.nodes import GridView, online_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.tifl.algorithm import ADAPTIVE, ALGORITHM_2, Floats, TierState, update_probs
from flwr_hetero.tifl.failures import FailureCounter
from flwr_hetero.tifl.pacing import steer
from flwr_hetero.tifl.tiers import Available, Draw, Tiers, check_chances


class TierEvaluation(Selection):
    """Evaluate on the nodes that the wrapped strategy would ask alone, those at work left out.

    The tiers' accuracies are those of the same nodes each time, which are asked even if the wrapped
    strategy leaves them out, in the rounds whose accuracies count.
    """

    policy: str | Sequence[float]
    named: str
    num_tiers: int
    credits: list[int] | None
    borrow: bool
    interval: int
    accuracy_key: str | None
    failures: FailureCounter
    rng: np.random.Generator

    contracts = (TIMES,)

    def __init__(self, strategy: Strategy | None, clients_per_round: int, **settings: bool) -> None:
        super().__init__(strategy, clients_per_round, **settings)
        if self.unbiased:
            check_chances(self.policy, self.num_tiers, self.credits, self.borrow)
        self.tiers = Tiers({}, {}, np.zeros(0))
        self.state = TierState.first(np.ones(1), np.ones(1), np.ones(1))
        self.draw = Draw(None, [], np.zeros(0))
        self._panel: list[int] = []
        self._further: Set[int] = frozenset()

    def helps(self, context: Exchange, reply: Message, contract: Contract) -> bool | None:
        """Return whether a node of a simulation says how long it took; elsewhere it need not."""
        latency = context.latency_of(reply)
        if self.num_tiers == 1 or latency is None or not context.simulated or context.same_clock:
            return None
        return latency.source != "observed"

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Let the wrapped strategy ask as many nodes as it would alone, if so many are free."""
        view = GridView(grid, self.select_for_evaluation(context, grid))
        if self._inner_evaluates:
            leaf: Any = self.leaf
            leaf.min_evaluate_nodes = min(self._min_evaluate_nodes, len(view.node_ids))
        return view

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Return all free nodes; where only TiFL needs figures, the same of every tier."""
        online, registry = online_nodes(grid), self.fleet.nodes
        if self._inner_evaluates:
            blocked, identity = self.failures.blocked, registry.identity
            free = [node for node in online if node not in registry.in_flight]
            return [n for n in free if identity(n) not in blocked] if blocked else free
        if not self._is_evaluation_due(context.round):
            return []
        return self.tiers.panel(self._available(online))

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
        if messages and self._is_evaluation_due(server_round):
            self._panel = self.tiers.panel(self._available(online_nodes(grid)))
            asked = {message.metadata.dst_node_id for message in messages}
            self._further = frozenset(self._panel) - asked
            if self._further:
                messages += [copy_for(node_id, messages[0]) for node_id in sorted(self._further)]
                if self.outer is None:
                    self.current(context).ask(messages, grid)
        return messages

    def _available(self, online: Set[int]) -> Available:
        blocked, registry = self.failures.blocked, self.fleet.nodes
        busy, find = registry.in_flight, registry.find

        def available(identity: str) -> int | None:
            node_id = find(identity)
            free = node_id in online and node_id not in busy and identity not in blocked
            return node_id if free else None

        return available

    def _is_evaluation_due(self, server_round: int) -> bool:
        if self.named not in (ADAPTIVE, ALGORITHM_2) or not self.tiers.latency:
            return False
        first = self.named == ALGORITHM_2 and bool(np.isnan(self.state.accuracy).all())
        return first or server_round % self.interval == 0  # Alg. 2, l. 3

    def on_evaluate_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn the tiers' accuracies when they are due."""
        if self._is_evaluation_due(context.round):
            panel = set(self._panel)
            reported = {
                self.identity(reply.metadata.src_node_id): metrics
                for reply in replies
                for metrics in list(reply.content.metric_records.values())[:1]
                if reply.metadata.src_node_id in panel
            }
            weight_key = getattr(self.leaf, "weighted_by_key", "num-examples")
            accuracy = accuracy_per_tier(reported, self.tiers, self.accuracy_key, weight_key)
            if self.named == ADAPTIVE:
                self.state = steer(self.state, accuracy)
            else:
                self.state = update_probs(self.state, accuracy, self.draw.tier)
        return [reply for reply in replies if reply.metadata.src_node_id not in self._further]

    def on_evaluate_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Count failures of nodes that only evaluate."""
        if good:  # else it may be the ClientApp that cannot evaluate
            self.failures.record_evaluation(set(good), set(failed))


def copy_for(node_id: int, message: Message) -> Message:
    """Return an instruction like this one for another node."""
    return Message(own_records(message.content), node_id, message.metadata.message_type)


def accuracy_per_tier(
    reported: Mapping[str, MetricRecord],
    tiers: Tiers,
    accuracy_key: str | None,
    weight_key: str,
) -> Floats:
    """Average the reported accuracy of each tier, weighted by examples (Alg. 2, l. 21-23)."""
    total, weight = np.zeros(len(tiers.members)), np.zeros(len(tiers.members))
    for identity, metrics in reported.items():
        accuracy, examples = accuracy_of(metrics, accuracy_key), read_number(metrics, weight_key, 1)
        tier = tiers.tier.get(identity)
        if tier is not None and not np.isnan(accuracy):
            total[tier] += accuracy * examples
            weight[tier] += examples
    if reported and not weight.any():
        names = sorted(next(iter(reported.values())))
        text = "TiFL: no accuracy in the evaluation replies; set accuracy_key to one of %s"
        log(WARNING, text, names)
    mean = np.full(len(tiers.members), np.nan)
    np.divide(total, weight, out=mean, where=weight > 0)
    return mean


def accuracy_of(metrics: MetricRecord, accuracy_key: str | None) -> float:
    """Read a metric of which more is better; NaN if there is none."""
    if accuracy_key is not None:
        return read_number(metrics, accuracy_key)
    for part, sign in (("acc", 1.0), ("loss", -1.0)):
        for name in metrics:
            if part in name.lower():
                return sign * read_number(metrics, name)
    return np.nan
