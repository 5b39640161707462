"""Nodes that come later: measured alongside training, then placed in a tier."""

from collections.abc import Iterable, Set
from logging import INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero.strategy.grid_view import is_simulated
from flwr_hetero.strategy.latency import judge_latency, reported_partition
from flwr_hetero.strategy.profiling import has_raised, profile_message

if TYPE_CHECKING:
    from flwr_hetero.strategy.tifl import TiFL

LOOK_EVERY = 10
"""Rounds after which newcomers are looked for even if the number of nodes has not changed."""
LARGE_FLEET = 10_000
"""Nodes from which on looking is rarer, in proportion, so that its mean cost does not grow."""


class Joiners:
    """Send newcomers a profiling message without waiting, and place those that answered.

    A ClientApp that raises is sent an ordinary training message instead, once; a node that could
    not be reached is new again.

    Parameters
    ----------
    tifl : TiFL
        Whose tiers they join.
    t_max : float
        Slowest latency in seconds that gets a tier.
    """

    def __init__(self, tifl: "TiFL", t_max: float) -> None:
        self.tifl = tifl
        self.t_max = t_max
        self._known: set[int] = set()
        self._num_online = 0
        self._rounds_since = 0
        self._open: dict[str, _Asked] = {}

    def know(self, node_ids: Iterable[int]) -> None:
        """Take these nodes and no others as known: they were profiled.

        Parameters
        ----------
        node_ids : iterable of int
            Flower's node ids.
        """
        self._known = set(node_ids)
        self._num_online = len(self._known)

    def attend(self, grid: Grid, online: Set[int], server_round: int) -> None:
        """Place newcomers that answered, ask those that are new.

        Parameters
        ----------
        grid : Grid
            The fleet.
        online : set of int
            Nodes there now.
        server_round : int
            Current round.
        """
        if self._open:
            for reply in grid.pull_messages(list(self._open)):
                self._take_in(reply, grid, online, server_round)
        self._rounds_since += 1
        size = 1 + len(online) // LARGE_FLEET
        changed = len(online) != self._num_online
        if self._rounds_since < (size if changed else LOOK_EVERY * size):
            return
        self._num_online, self._rounds_since = len(online), 0
        newcomers = sorted(online - self._known)
        if newcomers:
            self.tifl.session.roster.learn(grid)
            self._known.update(newcomers)
            log(INFO, "TiFL: %d new nodes are profiled alongside training", len(newcomers))
            self._ask(grid, newcomers, keys.PROFILE_MESSAGE, server_round)

    def _ask(self, grid: Grid, node_ids: list[int], kind: str, server_round: int) -> None:
        messages = [
            profile_message(self.tifl, node_id, kind, server_round, 0) for node_id in node_ids
        ]
        list(grid.push_messages(messages))
        for message in messages:  # a grid may leave out one whose node is gone
            if message.metadata.message_id:
                self._open[message.metadata.message_id] = _Asked(message.metadata.dst_node_id, kind)

    def _take_in(self, reply: Message, grid: Grid, online: Set[int], server_round: int) -> None:
        asked = self._open.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return
        if reply.has_content():
            self._place(asked.node_id, reply, grid, online)
        elif has_raised(reply) and asked.kind == keys.PROFILE_MESSAGE:
            self._ask(grid, [asked.node_id], MessageType.TRAIN, server_round)
        else:
            name = self.tifl.identity(asked.node_id)
            log(WARNING, "TiFL: %s could not be profiled: %s", name, reply.error.reason)
            if not has_raised(reply):
                self._known.discard(asked.node_id)

    def _place(self, node_id: int, reply: Message, grid: Grid, online: Set[int]) -> None:
        table, roster = self.tifl.table, self.tifl.session.roster
        if table is None:
            return
        latency, _ = judge_latency(reply, None, simulated=is_simulated(grid))
        partition = reported_partition(reply)
        if partition is not None:
            owner = roster.find(f"node-{partition}")
            if owner is not None and owner != node_id and owner not in online:
                roster.forget(owner)  # it came back under another node id
            roster.hear(node_id, partition)
        identity = roster.identity(node_id)
        if latency is None or latency.seconds >= self.t_max:
            log(INFO, "TiFL: %s has no usable latency and waits for the next profiling", identity)
        elif identity in table.tier:
            log(INFO, "TiFL: %s is back in tier %d", identity, table.tier[identity])
        else:
            tier = table.add(identity, latency.seconds)
            log(INFO, "TiFL: %s joins tier %d (%.3g s)", identity, tier, latency.seconds)


class _Asked(NamedTuple):
    """A question to a newcomer that is not answered yet."""

    node_id: int
    kind: str
