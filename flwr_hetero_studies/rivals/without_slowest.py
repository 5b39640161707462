"""FedAvg without the slowest nodes, which are timed once and never train."""

from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_number
from flwr_hetero_studies.rivals.node_memory import TimedSelection


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
