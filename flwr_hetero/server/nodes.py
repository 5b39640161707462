"""A Grid that shows only some of its nodes."""

import hashlib
import re
import time
from collections.abc import Iterable, Sequence, Set
from logging import INFO

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_hetero._flwr import NodeInfo, Run, is_simulation_grid, log


class GridView(Grid):
    """Show only the chosen nodes of a grid; everything else goes through.

    This is how a selection reaches any Flower strategy without a change to it.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        self.grid = grid
        self.node_ids = list(node_ids)

    def set_run(self, run: Run) -> None:
        """Set the run of the whole grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """Run information."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the chosen nodes."""
        return list(self.node_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return what is known of the chosen nodes."""
        chosen = set(self.node_ids)
        return [info for info in self.grid.get_nodes() if info.node_id in chosen]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies."""
        return self.grid.send_and_receive(messages, timeout=timeout)


def is_simulated(grid: Grid) -> bool:
    """Tell whether a grid's nodes are simulated, so that they may report emulated times."""
    while isinstance(grid, GridView):
        grid = grid.grid
    return hasattr(grid, "virtual_time_s") or is_simulation_grid(grid)


class NodeRegistry:
    """Map Flower's node ids to identities that stay the same over rounds and runs.

    The identity is, in this order of preference: the name given at registration, a hash of the
    node's public key, the ``partition-id`` that the node reports, the node id. Two nodes that
    claim the same identity keep apart: the second stays with its node id.
    """

    def __init__(self) -> None:
        self._identity: dict[int, str] = {}
        self._node_id: dict[str, int] = {}

    def learn(self, grid: Grid) -> None:
        """Read names and public keys of the nodes online."""
        if is_simulated(grid):
            return
        for info in grid.get_nodes():
            if info.name:
                self._claim(info.node_id, f"{info.name}")
            elif info.public_key:
                self._claim(info.node_id, f"key-{hashlib.sha256(info.public_key).hexdigest()[:12]}")

    def set_partition_id(self, node_id: int, partition_id: int) -> None:
        """Take note of the partition that a node reports; a better identity is kept."""
        if node_id not in self._identity:
            self._claim(node_id, f"node-{partition_id}")

    def knows(self, node_id: int) -> bool:
        """Tell whether a node has an identity better than its node id."""
        return node_id in self._identity

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity."""
        return self._identity.get(node_id, f"id-{node_id}")

    def find(self, identity: str) -> int | None:
        """Return the node id that now belongs to an identity."""
        if identity not in self._node_id and re.fullmatch(r"id-\d+", identity):
            return int(identity[3:])
        return self._node_id.get(identity)

    def sort_key(self, node_id: int) -> tuple[str, int, str]:
        """Return a key that sorts nodes by identity, numbers by value."""
        return natural_key(self.identity(node_id))

    def _claim(self, node_id: int, identity: str) -> None:
        owner = self._node_id.setdefault(identity, node_id)
        if owner == node_id:
            self._identity[node_id] = identity

    def forget(self, node_id: int) -> None:
        """Free the identity of a node that is gone, so that it can come back under a new id."""
        identity = self._identity.pop(node_id, None)
        if identity is not None:
            del self._node_id[identity]


def natural_key(identity: str) -> tuple[str, int, str]:
    """Return a sort key that orders trailing numbers by value."""
    match = re.fullmatch(r"(.*?)(\d+)", identity)
    return (match[1], int(match[2]), identity) if match else (identity, -1, identity)


WAIT_S = 600.0
"""Seconds to wait for a fleet of which nobody is there."""


SETTLE_S = 20.0
"""Seconds to wait for a further node of a fleet that comes online."""


def online_nodes(grid: Grid) -> Set[int]:
    """Return the nodes online as a set, without copying one."""
    node_ids = grid.get_node_ids()
    return node_ids if isinstance(node_ids, Set) else set(node_ids)


def wait_for_nodes(grid: Grid, at_least: int, wait_s: float) -> Set[int]:
    """Wait until enough nodes are online, or until time is up."""
    waited_s = 0.0
    while len(online := online_nodes(grid)) < at_least:
        if waited_s >= wait_s or is_simulated(grid):
            break
        log(INFO, "Waiting for nodes: %d of %d", len(online), at_least)
        time.sleep(1)
        waited_s += 1
    if not online:
        raise RuntimeError(f"no node is online after {waited_s:.0f} s: start the SuperNodes.")
    return online


def settled_nodes(
    grid: Grid, wanted: int, wait_s: float = WAIT_S, settle_s: float = SETTLE_S
) -> Set[int]:
    """Wait until as many nodes as wanted are online, or until no further one comes."""
    online = wait_for_nodes(grid, 1, wait_s)
    while len(online) < wanted:
        before = len(online)
        online = wait_for_nodes(grid, before + 1, settle_s)
        if len(online) <= before:
            break
    return online
