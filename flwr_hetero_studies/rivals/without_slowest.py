"""FedAvg without the slowest nodes: they are timed once, and then never train."""

from collections.abc import Set
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_count, check_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.selection import Selection
from flwr_hetero_studies.rivals.node_memory import NodeMemory, time_nodes


class WithoutSlowest(NodeMemory, Selection):
    """Train nodes drawn uniformly each round from all but the slowest.

    What many do who do not want to wait, and the simplest method to be ahead of. ``left_out`` is
    the share of the nodes that never train; their data are lost.

    Notes
    -----
    Before the first round all nodes are timed in one of their own, which takes time of the clock.
    They are not timed again: unlike ``DeadlineSelection`` it leaves out a number of nodes, not what
    misses a deadline, and times that vary do not make it leave out ever more. A node that was not
    timed counts as quick.
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
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        self.left_out = check_number("left_out", left_out, "[0, 1)")
        super().__init__(strategy, clients_per_round)
        self.latency_s: dict[str, float] = {}

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        if not self.latency_s:
            self.latency_s = time_nodes(self, context, grid, list(online), context.timeout_s)
        slowest = self.slowest()
        quick = [node for node in sorted(online) if self.identity(node) not in slowest]
        # if only slow ones are online, they train
        quick = quick or sorted(online)
        count = min(self.clients_per_round or len(quick), len(quick))
        return [
            quick[i] for i in sorted(self.rng.choice(len(quick), count, replace=False).tolist())
        ]

    def slowest(self) -> set[str]:
        """Return the nodes that are left out."""
        by_time = sorted(self.latency_s, key=lambda node: (self.latency_s[node], node))
        count = min(round(self.left_out * len(by_time)), len(by_time) - 1)
        return set(by_time[len(by_time) - count :])

    def round_info(self) -> dict[str, Any]:
        return {"left_out": sorted(self.slowest())}
