"""When nodes are timed: here in a phase of its own (section 4.2)."""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from logging import WARNING
from typing import ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count
from flwr_hetero.server.profiling import profile_message, profile_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.tifl.grouping import Found, TierRule, tier_fleet
from flwr_hetero.tifl.membership import FailureCounter, LateJoiners
from flwr_hetero.tifl.tiers import Tiers

STATE = {"last_profile": int, "forming": int, "times": str}
"""Entries of a saved Timing."""


class Timing:
    """What TiFL asks of a way to time nodes; every method does nothing where not overridden.

    ``last`` is the round in which tiers were formed, ``forming`` whether some nodes have never
    been placed.
    """

    in_training: ClassVar[bool] = False
    """Whether rounds go on before all nodes have answered."""

    def __init__(
        self, strategy: Selection, rule: TierRule, every: int | None, failures: FailureCounter
    ) -> None:
        self.strategy, self.session = strategy, strategy.session
        self.rule, self.every, self.failures = rule, every, failures
        self.last, self.forming = 0, True
        self.left_out: list[int] = []
        """Nodes whose replies to the last round do not count, for it went on before."""

    def start(self, grid: Grid, online: Set[int]) -> Found | None:
        """Begin a run without tiers."""

    def resume(self, online: Set[int], tiers: Tiers) -> None:
        """Go on with these tiers."""

    def update(self, server_round: int, grid: Grid, online: Set[int], tiers: Tiers) -> Found | None:
        """Place newcomers in the tiers before a round; return new ones where it is time."""
        raise NotImplementedError

    def newcomers(self, grid: Grid, online: Set[int], rng: np.random.Generator) -> list[int]:
        """Return nodes that take part in a round to be timed."""
        return []

    def wait(self, grid: Grid, online: Set[int]) -> bool:
        """Wait for a node that is being timed; return False if there is none."""
        return False

    def take(
        self, replies: list[Message], enough: int | None, online: Set[int]
    ) -> Sequence[Message]:
        """Learn from a round's good replies; return those that count: the first ``enough``."""
        return replies

    def retry(self, names: Sequence[str]) -> None:
        """Learn which nodes failed in a round."""

    def state_dict(self) -> dict[str, str | int]:
        """Return what a run goes on with."""
        return {"last_profile": self.last, "forming": int(self.forming), "times": "{}"}

    def load_state_dict(self, state: Mapping[str, object], tiers: Tiers) -> None:
        """Continue from ``state_dict``."""
        self.last, self.forming = int(str(state["last_profile"])), bool(state["forming"])


class Phase(Timing):
    """Time the whole fleet before the first round, and again every so many rounds."""

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
        message = partial(profile_message, strategy)
        self.joiners = LateJoiners(self.session.registry, rule.t_max, message)

    def start(self, grid: Grid, online: Set[int]) -> Found | None:
        """Profile."""
        return self._profile(grid, online, 0, first=True)

    def resume(self, online: Set[int], tiers: Tiers) -> None:
        """Take the nodes of the tiers as profiled."""
        identity = self.strategy.identity
        self.joiners.set_known(node for node in online if identity(node) in tiers.latency)

    def update(self, server_round: int, grid: Grid, online: Set[int], tiers: Tiers) -> Found | None:
        """Profile again if it is due, else late joiners only."""
        if not tiers.latency or (self.every and server_round - self.last >= self.every):
            return self._profile(grid, online, server_round, first=not tiers.latency)
        self.joiners.update(grid, online, tiers, server_round)
        return None

    def _profile(
        self, grid: Grid, online: Set[int], server_round: int, first: bool
    ) -> Found | None:
        self.last = server_round
        registry, t_max = self.session.registry, self.rule.t_max
        registry.learn(grid)
        nodes, rounds = profile_nodes(
            self.strategy,
            grid,
            sorted(online),
            server_round=server_round,
            sync_rounds=self.sync_rounds,
            warmup_rounds=self.warmup_rounds,
            t_max=t_max,
        )
        found = tier_fleet(nodes, rounds, registry, self.rule)
        if found is None:
            what = f"TiFL: no node answered the profiling within t_max={t_max:g} s"
            if first:
                raise RuntimeError(f"{what}: check the ClientApp's log, or raise t_max.")
            log(WARNING, "%s: the tiers stay as they are", what)
            return None
        found.log(0)
        self.failures.clear()
        self.joiners.set_known(online)
        return found
