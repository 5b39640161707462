"""FedCS: leave out the nodes that cannot make a round's deadline."""

from math import inf, isfinite
from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.server.selection import Outcome
from flwr_hetero_studies.rivals.node_memory import TimedSelection

SMOOTHING = 0.5
"""Weight of the past in a node's latency."""


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
