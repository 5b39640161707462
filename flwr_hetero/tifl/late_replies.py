"""Replies that no round waits for: of nodes that are timed, and of those alone."""

import math
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.server.checks import Expected, is_good, reported_partition
from flwr_hetero.server.context import POLL_S, TRUSTED, Exchange
from flwr_hetero.server.nodes import is_simulated, whole_grid
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.tifl.tiers import T_MAX


@dataclass
class FirstWork:
    """What a node does when it is timed first: when it began and is over, by the fleet's clock."""

    node_id: int
    began_s: float
    pushed_s: float
    over_s: float
    seconds: float = math.nan
    missing_s: float = 0.0
    """For how long the reply was not there yet."""
    is_here: bool = False


class LateReplies:
    """Collect replies to instructions whose rounds have gone on without them."""

    def __init__(self, strategy: Wrapper) -> None:
        self.strategy, self.fleet = strategy, strategy.fleet
        self.open: dict[str, FirstWork] = {}

    def add(self, message: Message, node_id: int, began_s: float, pushed_s: float) -> FirstWork:
        """Leave a node alone until its reply is here, or T_max is over."""
        work = FirstWork(node_id, began_s, pushed_s, over_s=began_s + T_MAX)
        self.open[message.metadata.message_id] = work
        self.fleet.nodes.in_flight[node_id] = began_s
        return work

    def collect(self, context: Exchange, grid: Grid, online: Set[int]) -> Iterator[FirstWork]:
        """Yield the work that is over; its ``seconds`` are NaN if the node has failed."""
        self._pull(context, grid, online, enough=None)
        now_s = self.fleet.clock.virtual_s
        for message_id, work in list(self.open.items()):
            if work.over_s <= now_s:
                del self.open[message_id]
                self.fleet.nodes.in_flight.pop(work.node_id, None)
                yield work

    def wait(self, context: Exchange, grid: Grid, online: Set[int]) -> None:
        """Let time pass until some work is over."""
        self._pull(context, grid, online, enough=1)
        clock = self.fleet.clock
        if not hasattr(whole_grid(grid), "virtual_time_s") and not clock.emulated:
            time.sleep(POLL_S)
            clock.virtual_s += POLL_S
        else:
            over_s = min(work.over_s for work in self.open.values())
            clock.virtual_s = max(clock.virtual_s, over_s)

    def _pull(self, context: Exchange, grid: Grid, online: Set[int], enough: int | None) -> None:
        """Look for replies; on an emulated fleet ``enough`` of them are waited for."""
        waiting = [i for i, work in self.open.items() if not work.is_here]
        whole: Any = whole_grid(grid)
        if not waiting:
            return
        if hasattr(whole, "virtual_time_s"):
            # its pull_messages would take time
            limit_s = 0.0 if enough is None else T_MAX
            replies: Sequence[Message] = whole.wait_for(waiting, limit_s, enough)
        else:
            replies = list(grid.pull_messages(waiting))
        now_s = self.fleet.clock.virtual_s
        self.fleet.costs.answered(replies, now_s)
        late = Exchange(self.fleet, context.round, timeout_s=T_MAX, simulated=is_simulated(grid))
        for reply in replies:
            if (work := self.open.get(reply.metadata.reply_to_message_id)) is not None:
                self._time(late, reply, work, online)
        for work in self.open.values():
            if not work.is_here:
                work.missing_s = now_s - work.began_s

    def _time(self, late: Exchange, reply: Message, work: FirstWork, online: Set[int]) -> None:
        """Learn from a reply how long its node took."""
        work.is_here, work.over_s = True, self.fleet.clock.virtual_s
        if not late.simulated:
            seen_s = time.monotonic() - work.pushed_s
            late.round_trip_s[reply.metadata.reply_to_message_id] = seen_s
        if not is_good(late, reply, work.node_id, Expected(metrics=False)):
            return
        seconds, latency = latency_of(late, reply, online), late.latency_of(reply)
        # it may claim less than it can have taken: the reply was not there before
        work.seconds = max(seconds, TRUSTED * work.missing_s)
        if latency is not None and latency.emulated:
            work.over_s = max(work.over_s, work.began_s + work.seconds)
        for wrapper in self.strategy.top.wrappers():
            wrapper.on_profile_replies(late, [reply])


def latency_of(context: Exchange, reply: Message, online: Set[int]) -> float:
    """Return how long a node took; one that has rejoined gets its old name."""
    node_id, partition = reply.metadata.src_node_id, reported_partition(reply)
    if partition is not None and not context.fleet.nodes.knows(node_id):
        context.fleet.nodes.rejoin(node_id, partition, online)
    return context.comparable_s(reply)
