"""Timing nodes in rounds of their own before training (section 4.2)."""

import time
from collections.abc import Sequence, Set
from logging import INFO, WARNING
from typing import ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, with_cure
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.profiling import profile_message, profile_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.tifl.failures import FailureCounter
from flwr_hetero.tifl.grouping import Found, TierRule, tier_fleet
from flwr_hetero.tifl.tiers import Tiers
from flwr_hetero.tifl.training_times import Job, TrainingTimes


class Phase(TrainingTimes):
    """Time the whole fleet before the first round, and again every so many rounds.

    Later joiners are sent a profiling message that no round waits for.
    """

    in_training: ClassVar[bool] = False

    def __init__(
        self,
        strategy: Selection,
        rule: TierRule,
        every: int | None,
        failures: FailureCounter,
        sync_rounds: int | None,
        warmup_rounds: int | None,
    ) -> None:
        super().__init__(strategy, rule, every, failures)
        self.forming = False
        self.sync_rounds = 3 if sync_rounds is None else check_count("sync_rounds", sync_rounds, 1)
        self.warmup_rounds = 1
        if warmup_rounds is not None:
            self.warmup_rounds = check_count("warmup_rounds", warmup_rounds)

    def start(self, context: Exchange, grid: Grid, online: Set[int]) -> Found | None:
        """Profile."""
        return self._profile(context, grid, online, first=True)

    def update(self, context: Exchange, grid: Grid, online: Set[int], tiers: Tiers) -> Found | None:
        """Profile again if it is due, else place the joiners that have answered."""
        if not tiers.latency or (self.every and context.round - self.last >= self.every):
            return self._profile(context, grid, online, first=not tiers.latency)
        self.failures.record_late(set(self._collect(context, grid, online)))
        self._place(tiers)
        return None

    def newcomers(
        self, context: Exchange, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Ask joiners for their latency; none takes part in the round for that."""
        kind = self._registry.profile_kind or keys.PROFILE_MESSAGE
        joiners = super().newcomers(context, grid, online, rng)
        messages = [profile_message(self.strategy, context, n, kind, 0) for n in joiners]
        if joiners:
            log(INFO, "TiFL: %d new nodes are profiled alongside training", len(joiners))
            list(grid.push_messages(messages))
            self.fleet.costs.sent(messages, self.fleet.clock.virtual_s, self.rule.t_max)
        for node_id, message in zip(joiners, messages, strict=True):
            if message.metadata.message_id:  # none if the node is gone
                began_s = self.fleet.clock.virtual_s
                self._add(message, Job(node_id, began_s, time.monotonic()))
        return []

    def take(
        self, context: Exchange, replies: list[Message], enough: int | None, online: Set[int]
    ) -> Sequence[Message]:
        """Return all replies of a round."""
        return replies

    def retry(self, names: Sequence[str]) -> None:
        """Ask joiners without a latency again, when newcomers are looked for next."""
        super().retry(names)
        self._more = False

    def set_known(self, online: Set[int]) -> None:
        """Take these nodes, and no others, as profiled."""
        self._known, self._num_online = set(online), len(online)
        self._rounds_since, self._more = 0, False

    def _profile(
        self, context: Exchange, grid: Grid, online: Set[int], first: bool
    ) -> Found | None:
        self.last = context.round
        t_max = self.rule.t_max
        self._registry.learn(grid)
        nodes, rounds = profile_nodes(
            self.strategy,
            context,
            grid,
            sorted(online),
            sync_rounds=self.sync_rounds,
            warmup_rounds=self.warmup_rounds,
            t_max=t_max,
        )
        found = tier_fleet(nodes, rounds, self._registry, self.rule)
        if found is None:
            what = f"TiFL: no node answered the profiling within t_max={t_max:g} s"
            if first:
                failures = self.fleet.info.failures
                why = f" ({failures[-1].reason})" if failures else ""
                raise RuntimeError(
                    with_cure(f"{what}{why}: check the ClientApp's log, or raise t_max.")
                )
            log(WARNING, "%s: the tiers stay as they are", what)
            return None
        found.log(0)
        self.failures.clear()
        self.set_known(online)
        self._seconds = {name: [seconds] for name, seconds in found.tiers.latency.items()}
        return found
