"""From a fleet to its tiers: profile, leave out who never answered, group the rest."""

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.exchange import judge_latency, reported_partition
from flwr_hetero.server.nodes import is_simulated
from flwr_hetero.server.profiling import has_raised, profile_message, profile_nodes
from flwr_hetero.tifl.algorithm import Tiering, histogram_tiers, median_latency, quantile_tiers
from flwr_hetero.tifl.tiers import TierTable

if TYPE_CHECKING:
    from flwr_hetero.server.wrapper import Wrapper
    from flwr_hetero.tifl.strategy import TiFL


TIERINGS: dict[str, Callable[[NDArray[np.float64], int], Tiering]] = {
    "quantile": quantile_tiers,
    "histogram": histogram_tiers,
}


@dataclass(frozen=True)
class TieringSettings:
    """How tiers are made; see :class:`~flwr_hetero.strategy.TiFL` for the meaning."""

    num_tiers: int = 5
    tiering: str = "quantile"
    sync_rounds: int = 3
    warmup_rounds: int = 1
    t_max: float = 600.0
    profile_interval: int | None = None

    def __post_init__(self) -> None:
        check_count("num_tiers", self.num_tiers, 1, "pass the number of groups you want")
        check_count("sync_rounds", self.sync_rounds, 1, "3 is usual")
        check_count("warmup_rounds", self.warmup_rounds, 0, "1 is usual")
        if self.profile_interval is not None:
            check_count("profile_interval", self.profile_interval, 1, "None profiles only once")
        if not (np.isfinite(self.t_max) and self.t_max > 0):
            raise invalid("t_max", self.t_max, "be positive and finite", "pass seconds")
        if self.tiering not in TIERINGS:
            raise invalid("tiering", self.tiering, f"be one of {sorted(TIERINGS)}", "choose one")

    def is_due(self, rounds_since: int) -> bool:
        """Tell whether it is time to profile again."""
        return self.profile_interval is not None and rounds_since >= self.profile_interval


class TieredFleet(NamedTuple):
    """What a profiling found."""

    table: TierTable
    tiering: Tiering
    rounds: NDArray[np.float64]


def tier_fleet(
    strategy: "Wrapper",
    grid: Grid,
    online: Collection[int],
    server_round: int,
    settings: TieringSettings,
) -> TieredFleet | None:
    """Profile the nodes that are there and group them by latency."""
    registry = strategy.session.registry
    registry.learn(grid)
    measured = profile_nodes(
        strategy,
        grid,
        sorted(online),
        server_round=server_round,
        sync_rounds=settings.sync_rounds,
        warmup_rounds=settings.warmup_rounds,
        t_max=settings.t_max,
    )
    column = sorted(range(len(online)), key=lambda i: registry.sort_key(measured.node_ids[i]))
    rounds = measured.rounds[:, column]
    latency, dropout = median_latency(rounds, settings.t_max)
    if dropout.all():
        return None
    make_tiers = TIERINGS[settings.tiering]
    tiering = make_tiers(np.where(dropout, np.nan, latency), settings.num_tiers)
    if tiering.num_tiers < settings.num_tiers:
        few, wanted = tiering.num_tiers, settings.num_tiers
        log(WARNING, "TiFL: %d tiers instead of %d: the latencies allow no more", few, wanted)
    log(
        INFO,
        "TiFL: tiers of %s nodes, fastest first; %d nodes dropped out",
        tiering.sizes.tolist(),
        dropout.sum(),
    )
    names = [registry.identity(measured.node_ids[i]) for i in column]
    return TieredFleet(TierTable(names, latency, tiering), tiering, rounds)


LOOK_EVERY = 10
"""Rounds after which newcomers are looked for even if the number of nodes has not changed."""


LARGE_FLEET = 10_000
"""Nodes from which on looking is rarer, in proportion, so that its mean cost does not grow."""


class Joiners:
    """Send newcomers a profiling message without waiting, and place those that answered.

    A ClientApp that raises is sent an ordinary training message instead, once; a node that could
    not be reached is new again.
    """

    def __init__(self, tifl: "TiFL", t_max: float) -> None:
        self.tifl = tifl
        self.t_max = t_max
        self._known: set[int] = set()
        self._num_online = 0
        self._rounds_since = 0
        self._open: dict[str, _Asked] = {}

    def know(self, node_ids: Iterable[int]) -> None:
        """Take these nodes and no others as known: they were profiled."""
        self._known = set(node_ids)
        self._num_online = len(self._known)

    def attend(self, grid: Grid, online: Set[int], server_round: int) -> None:
        """Place newcomers that answered, ask those that are new."""
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
            self.tifl.session.registry.learn(grid)
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
        table, registry = self.tifl.table, self.tifl.session.registry
        if table is None:
            return
        latency, _ = judge_latency(reply, None, simulated=is_simulated(grid))
        partition = reported_partition(reply)
        if partition is not None:
            owner = registry.find(f"node-{partition}")
            if owner is not None and owner != node_id and owner not in online:
                registry.forget(owner)  # it came back under another node id
            registry.set_partition_id(node_id, partition)
        identity = registry.identity(node_id)
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
