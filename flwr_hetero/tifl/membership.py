"""Nodes that come after profiling, and nodes that keep failing."""

from collections.abc import Callable, Iterable, Sequence, Set
from logging import INFO, WARNING

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.server.nodes import NodeRegistry, is_simulated
from flwr_hetero.server.profiling import has_raised
from flwr_hetero.server.reply_checks import judge_latency, reported_partition
from flwr_hetero.tifl.tiers import Tiers

LOOK_EVERY = 10
"""Rounds after which newcomers are looked for even if the number of nodes has not changed."""
LARGE_FLEET = 10_000
"""Nodes from which on looking is rarer, in proportion, so that its mean cost does not grow."""


class LateJoiners:
    """Profile nodes that come after the phase, without waiting for them.

    A ClientApp that raises is sent an ordinary training message instead, once; a node that could
    not be reached counts as new again. ``message`` makes a profiling message, from a node, a
    message type, the round and a number.
    """

    def __init__(
        self,
        registry: NodeRegistry,
        t_max: float,
        message: Callable[[int, str, int, int], Message],
    ) -> None:
        self._registry, self._t_max, self._message = registry, t_max, message
        self._known: set[int] = set()
        self._num_online = 0
        self._rounds_since = 0
        self._open: dict[str, tuple[int, str]] = {}

    def set_known(self, node_ids: Iterable[int]) -> None:
        """Take these nodes, and no others, as profiled."""
        self._known = set(node_ids)
        self._num_online = len(self._known)

    def update(self, grid: Grid, online: Set[int], tiers: Tiers, server_round: int) -> None:
        """Place the joiners that have answered, ask those that are new."""
        if self._open:
            for reply in grid.pull_messages(list(self._open)):
                self._on_reply(reply, grid, online, tiers, server_round)
        self._rounds_since += 1
        size = 1 + len(online) // LARGE_FLEET
        changed = len(online) != self._num_online
        if self._rounds_since < (size if changed else LOOK_EVERY * size):
            return
        self._num_online, self._rounds_since = len(online), 0
        joiners = sorted(online - self._known)
        if joiners:
            self._registry.learn(grid)
            self._known.update(joiners)
            log(INFO, "TiFL: %d new nodes are profiled alongside training", len(joiners))
            kind = self._registry.profile_kind or keys.PROFILE_MESSAGE
            self._ask(grid, joiners, kind, server_round)

    def _ask(self, grid: Grid, node_ids: Sequence[int], kind: str, server_round: int) -> None:
        messages = [self._message(node_id, kind, server_round, 0) for node_id in node_ids]
        list(grid.push_messages(messages))
        for node_id, message in zip(node_ids, messages, strict=True):
            if message.metadata.message_id:  # none if the node is gone
                self._open[message.metadata.message_id] = node_id, kind

    def _on_reply(
        self, reply: Message, grid: Grid, online: Set[int], tiers: Tiers, server_round: int
    ) -> None:
        if reply.metadata.reply_to_message_id not in self._open:
            return
        node_id, kind = self._open.pop(reply.metadata.reply_to_message_id)
        if reply.has_content():
            self._place(node_id, reply, grid, online, tiers)
        elif has_raised(reply) and kind == keys.PROFILE_MESSAGE:
            self._ask(grid, [node_id], MessageType.TRAIN, server_round)
        else:
            name = self._registry.identity(node_id)
            log(WARNING, "TiFL: %s could not be profiled: %s", name, reply.error.reason)
            if not has_raised(reply):
                self._known.discard(node_id)

    def _place(
        self, node_id: int, reply: Message, grid: Grid, online: Set[int], tiers: Tiers
    ) -> None:
        registry = self._registry
        latency, _ = judge_latency(reply, None, simulated=is_simulated(grid))
        partition = reported_partition(reply)
        if partition is not None:
            registry.come_back(node_id, partition, online)
        identity = registry.identity(node_id)
        if latency is None or latency.seconds >= self._t_max:
            log(INFO, "TiFL: %s has no usable latency and waits for the next profiling", identity)
        elif identity in tiers.tier:
            log(INFO, "TiFL: %s is back in tier %d", identity, tiers.tier[identity])
        else:
            tier = tiers.add(identity, latency.seconds)
            log(INFO, "TiFL: %s joins tier %d (%.3g s)", identity, tier, latency.seconds)


class FailureCounter:
    """Count the failures of each node in a row; too many, and it is blocked until profiled again.

    A node that trained in a round is judged by that, and not by its evaluation.
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures: dict[str, int] = {}
        self._trained: Set[str] = frozenset()

    @property
    def blocked(self) -> set[str]:
        """Identities that are not asked."""
        return {name for name, count in self.failures.items() if count >= self.max_failures}

    def record_training(self, good: Set[str], failed: Set[str]) -> None:
        """Count the outcome of training; success begins the row again."""
        self._add(failed)
        for name in good:
            self.failures.pop(name, None)
        self._trained = good | failed

    def record_evaluation(self, failed: Set[str]) -> None:
        """Count failures of nodes that only evaluated."""
        self._add(failed - self._trained)

    def record_late(self, failed: Set[str]) -> None:
        """Count failures of nodes that no round waits for."""
        self._add(failed)

    def clear(self) -> None:
        """Forget all failures."""
        self.failures.clear()

    def _add(self, failed: Set[str]) -> None:
        for name in sorted(failed):
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == self.max_failures:
                text = "%s failed %d times in a row and is not asked until the next profiling"
                log(WARNING, text, name, self.max_failures)
