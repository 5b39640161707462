"""Selections that leave slow nodes out: FedCS, and FedAvg without the slowest."""

from collections.abc import Set
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.server.selection import Outcome, Selection
from flwr_hetero_studies.rivals.node_memory import NodeMemory, time_nodes

SMOOTHING = 0.5
"""Weight of the past in a node's latency, for a deadline."""


class TimedSelection(NodeMemory, Selection):
    """Time all nodes once, before the first round, and draw from those that are eligible."""

    def __init__(
        self, strategy: Strategy | None, clients_per_round: int | None, *, seed: int
    ) -> None:
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        super().__init__(strategy, clients_per_round)
        self.latency_s: dict[str, float] = {}

    def eligible(self, online: list[int]) -> list[int]:
        raise NotImplementedError

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        if not self.latency_s:
            self.latency_s = time_nodes(self, context, grid, list(online), context.timeout_s)
        nodes = self.eligible(sorted(online))
        count = min(self.clients_per_round or len(nodes), len(nodes))
        drawn = self.rng.choice(len(nodes), count, replace=False)
        return [nodes[i] for i in sorted(drawn.tolist())]


class DeadlineSelection(TimedSelection):
    """Train as many nodes as make the deadline of a round, by their measured latencies.

    Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in
    Mobile Edge", ICC 2019. All nodes are timed in a round of profiling before the first round.
    Without a ``deadline_s``, the deadline is a time that four of five nodes meet.

    In the paper, nodes send their models one after the other over one channel. Here each node has
    its own link, so that the paper's greedy set contains all nodes that are fast enough. Nodes are
    drawn from these up to the number allowed. If no node is fast enough, the fastest one trains.
    """

    name: ClassVar[str] = "deadline"
    facts = "latency_s", "limit_s"

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int | None = None,
        *,
        deadline_s: float | None = None,
        seed: int = 0,
    ) -> None:
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, "(0, inf)")
        super().__init__(strategy, clients_per_round, seed=seed)
        self.deadline_s = deadline_s
        # The deadline in effect, which is measured if the user gives none.
        self.limit_s = deadline_s

    def eligible(self, online: list[int]) -> list[int]:
        if self.limit_s is None and self.latency_s:
            known_s = sorted(self.latency_s.values())
            self.limit_s = known_s[-(-4 * len(known_s) // 5) - 1]
        # Nodes that were not timed count as fast until they have trained.
        times_s = {node: self.latency_s.get(self.identity(node), 0.0) for node in online}
        fit = [node for node, time_s in times_s.items() if time_s <= (self.limit_s or inf)]
        return fit or [min(times_s, key=lambda node: times_s[node])]

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        for node, (now_s, _) in good.items():
            if isfinite(now_s):
                past_s = self.latency_s.get(node, now_s)
                self.latency_s[node] = now_s + SMOOTHING * (past_s - now_s)

    def round_info(self) -> dict[str, Any]:
        limit_s = self.limit_s or inf
        late = [node for node, latency_s in self.latency_s.items() if latency_s > limit_s]
        return {"deadline_s": self.limit_s, "left_out": late}


class WithoutSlowest(TimedSelection):
    """Draw the nodes of each round uniformly from all nodes except the slowest.

    This is a common way to avoid waiting, and the simplest baseline. ``left_out`` is the share of
    the nodes that never train, whose data are lost.

    Notes
    -----
    All nodes are timed once, in a round of profiling before the first round, which takes time of
    the clock. Unlike ``DeadlineSelection``, this method excludes a fixed number of nodes, so that
    varying times do not exclude more and more nodes. A node that was not timed counts as fast.
    """

    name: ClassVar[str] = "without_slowest"
    facts = ("latency_s",)

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int | None = None,
        *,
        left_out: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.left_out = check_number("left_out", left_out, "[0, 1)")
        super().__init__(strategy, clients_per_round, seed=seed)

    def eligible(self, online: list[int]) -> list[int]:
        slowest = self.slowest()
        # If only slow nodes are online, they train.
        return [node for node in online if self.identity(node) not in slowest] or online

    def slowest(self) -> set[str]:
        """Return the nodes that never train."""
        by_time = sorted(self.latency_s, key=lambda node: (self.latency_s[node], node))
        count = min(round(self.left_out * len(by_time)), len(by_time) - 1)
        return set(by_time[len(by_time) - count :])

    def round_info(self) -> dict[str, Any]:
        return {"left_out": sorted(self.slowest())}
