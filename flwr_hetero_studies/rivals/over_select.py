"""Over-selection: ask more nodes than are needed and take the first that answer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_count, invalid
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.server.composition import check_enough_updates
from flwr_hetero.server.loop import showing
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict


class OverSelect(Wrapper):
    """End a round of training when enough nodes have replied; put it around a selection.

    To take 5 of 7 nodes, write ``OverSelect(RandomSelection(clients_per_round=7), take=5)``. A
    reply with an error does not count. A node that the round does not wait for has not failed. It
    neither trains nor evaluates until it has replied, or until the time-out of its round has
    passed. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
    select 130 % of the devices needed. TiFL inside must time its nodes in a phase.

    Fast nodes reply first, so that their data count more on a fleet of unequal devices. After a
    resume all nodes count as free, so that the run continues with other numbers.
    """

    name: ClassVar[str] = "over_select"
    decides = frozenset({"waiting"})
    outside_of = frozenset({"selection", "samples"})

    def __init__(self, strategy: Strategy | None = None, take: int = 5) -> None:
        self.take = check_count("take", take, 1)
        for inner in strategy.wrappers() if isinstance(strategy, Wrapper) else ():
            if inner.name == "tifl" and inner.timing.phase is None:
                rule = "time nodes before the first round inside OverSelect"
                raise invalid("strategy", type(inner).__name__, rule, "give it profiling='phase'")
        super().__init__(strategy)
        check_enough_updates(self.leaf, take, "take")
        # By message: the node, and the time at which it is given up.
        self._in_flight: dict[str, tuple[int, float]] = {}
        self._left_out: list[str] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *more: Any
    ) -> Messages:
        """Hide nodes in flight since an earlier round; if all are, wait for one of them."""
        queue = self.fleet.queue_on(grid)
        if self._in_flight:
            self._finish(queue.late(self._in_flight.keys()))
        while not self._free(grid) and self._in_flight:
            left_s = min(job[1] for job in self._in_flight.values()) - self.fleet.clock.virtual_s
            self._finish(queue.late(self._in_flight.keys(), left_s))
        ask = partial(super().configure_train, server_round, arrays, config)
        return self._of_free_nodes(ask, grid, *more)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *more: Any
    ) -> Messages:
        ask = partial(super().configure_evaluate, server_round, arrays, config)
        return self._of_free_nodes(ask, grid, *more)

    def _of_free_nodes(self, ask: Callable[..., Messages], grid: Grid, *more: Any) -> Messages:
        free = self._free(grid)
        if not self._in_flight:
            return ask(grid, *more)
        with showing(self.leaf, grid, free) as view:
            return ask(view, *more) if free else []

    def _free(self, grid: Grid) -> list[int]:
        now_s = self.fleet.clock.virtual_s
        self._in_flight = {i: job for i, job in self._in_flight.items() if job[1] > now_s}
        busy = {node_id for node_id, _ in self._in_flight.values()}
        return [node_id for node_id in grid.get_node_ids() if node_id not in busy]

    def _finish(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            self._in_flight.pop(reply.metadata.reply_to_message_id, None)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        context.enough = self.take
        return messages

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Note which nodes are still in flight; evaluation waits for all nodes that it asks."""
        until_s = self.fleet.clock.virtual_s - context.virtual_s + context.timeout_s
        for metadata in (message.metadata for message in context.surplus):
            self._in_flight[metadata.message_id] = metadata.dst_node_id, until_s
        self._left_out = [self.identity(m.metadata.dst_node_id) for m in context.surplus]
        return replies

    def state_dict(self) -> StateDict:
        return {}

    def round_info(self) -> dict[str, Any]:
        return {"not_waited_for": self._left_out, "in_flight": len(self._in_flight)}
