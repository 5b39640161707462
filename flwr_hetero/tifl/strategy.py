"""TiFL as a wrapper: profile, draw a tier and nodes of it, learn from who answered."""

import json
from collections.abc import Sequence, Set
from functools import partial
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.server.nodes import WAIT_S, online_nodes, wait_for_nodes
from flwr_hetero.server.profiling import identify_nodes, profile_message, profile_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.selection import Outcome, Selection
from flwr_hetero.state_dict import StateDict, check_state, entries_below, rng_from_str, rng_to_str
from flwr_hetero.tifl.algorithm import (
    ADAPTIVE,
    PACED,
    VANILLA,
    Floats,
    TierState,
    policy_probs,
    refund,
    resample,
    start_credits,
    update_probs,
)
from flwr_hetero.tifl.membership import TIERINGS, FailureCounter, LateJoiners, tier_fleet
from flwr_hetero.tifl.tiers import Available, Draw, Tiers, accuracy_per_tier, draw_nodes
from flwr_hetero.tifl.time_estimate import TimeEstimate

EVALUATE_PER_TIER = 5
"""Nodes of each tier on which its accuracy is measured."""
STATE = {
    **{"tiers": str, "failures": str, "last_profile": int, "rng": str},
    **{f"state/{name}": ((-1,), "f") for name in TierState._fields},
    **{f"estimate/{name}": float for name in ("paper_s", "exact_s", "actual_s")},
    **{f"estimate/{name}": ((-1,), "f") for name in ("median_s", "slowest_s")},
}
"""Entries of a saved TiFL."""


class TiFL(Selection):
    """Group nodes into tiers by latency and let one tier train each round.

    Before the first round every node is profiled. Each round then costs the latency of one
    tier and not that of the slowest node of the fleet. The tier is drawn from fixed
    probabilities (static policies) or from ones that favour tiers of low accuracy (adaptive).

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy that derives from FedAvg, or another wrapper;
        FedAvg if left out. Its ``fraction_train`` must be 1: TiFL selects.
    clients_per_round : int
        Nodes |C| that train each round.
    num_tiers : int
        Tiers wanted; fewer result if there are fewer different latencies.
    policy : str or sequence of float
        ``adaptive``, ``vanilla`` (no tiers), ``slow``, ``uniform``, ``random``, ``fast``,
        ``fast1``, ``fast2``, ``fast3``, or one probability per tier, fastest first.
    tiering : {"quantile", "histogram"}
        Tiers of equal size, or the paper's bins of equal width.
    sync_rounds, warmup_rounds : int
        Profiling rounds that count, and those before them that do not.
    t_max : float
        Time-out of a profiling round in seconds; a node that misses all of them drops out.
    profile_interval : int, optional
        Profile again every so many rounds; None: only once.
    interval : int
        Rounds between two evaluations of all tiers (adaptive).
    credits : int, "paced", "auto" or None
        How often each tier may train until all are refilled: so many times, as often as its
        measured speed earns, or without limit (None). "auto" is "paced" for the adaptive
        policy and None for static ones.
    accuracy_key : str, optional
        Metric of the evaluation replies of which more is better. None: the first with "acc" in
        its name, else minus the first with "loss" in its name.
    on_small_tier : {"shrink", "borrow"}
        With fewer than |C| nodes of the tier online: train fewer, or add nodes of the next
        faster tiers.
    max_failures : int
        Failures in a row after which a node is not asked until the next profiling.
    seed : int
        Of tier and node selection.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy cannot work with a selection from
        outside.

    Notes
    -----
    Deviations from the paper: one credit per round (Algorithm 2 as printed takes two), one draw
    over the tiers that have credits and nodes (as printed it may never end), credits are refilled
    when spent and given back where no reply counts, tiers are evaluated on a sample of nodes and
    only in the rounds whose figures are compared, quantile tiers by default. The paper leaves
    the credits and ChangeProbs open.

    References
    ----------
    Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = TiFL(FedAdam(), clients_per_round=5, policy="fast1")
    >>> TiFL(policy="warp")
    Traceback (most recent call last):
    ...
    ValueError: policy must be one of adaptive, vanilla, ..., got 'warp'.
    """

    name: ClassVar[str] = "tifl"

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        num_tiers: int = 5,
        *,
        policy: str | Sequence[float] = ADAPTIVE,
        tiering: str = "quantile",
        sync_rounds: int = 3,
        warmup_rounds: int = 1,
        t_max: float = 600.0,
        profile_interval: int | None = None,
        interval: int = 10,
        credits: int | str | None = "auto",
        accuracy_key: str | None = None,
        on_small_tier: str = "shrink",
        max_failures: int = 3,
        seed: int = 0,
    ) -> None:
        named = policy if isinstance(policy, str) else ""
        self.adaptive = named == ADAPTIVE
        self.num_selected = check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = 1 if named == VANILLA else check_count("num_tiers", num_tiers, 1)
        policy_probs(policy, self.num_tiers)
        self.policy, self.tiering = policy, check_choice("tiering", tiering, TIERINGS)
        self.sync_rounds = check_count("sync_rounds", sync_rounds, 1)
        self.warmup_rounds = check_count("warmup_rounds", warmup_rounds)
        self.t_max = check_number("t_max", t_max, "(0, inf)")
        if profile_interval is not None:
            check_count("profile_interval", profile_interval, 1)
        self.profile_interval = profile_interval
        self.interval = check_count("interval", interval, 1)
        if isinstance(credits, str):
            check_choice("credits", credits, ("auto", PACED), "or give a number, or None")
            credits = PACED if self.adaptive or credits == PACED else None
        elif credits is not None:
            credits = check_count("credits", credits, 1)
        self.credits, self.accuracy_key = credits, accuracy_key
        check_choice("on_small_tier", on_small_tier, ("shrink", "borrow"))
        self.borrow = on_small_tier == "borrow"
        self.failures = FailureCounter(check_count("max_failures", max_failures, 1))
        self.rng = np.random.default_rng(check_count("seed", seed))
        super().__init__(
            strategy, clients_per_round, evaluates=self.adaptive, fixed_size=self.borrow
        )
        self.tiers = Tiers({}, {}, np.zeros(0))
        self.state = TierState.first(np.ones(1), np.ones(1))
        self.estimate = TimeEstimate()
        self.joiners = LateJoiners(self.session.registry, t_max, partial(profile_message, self))
        self.draw = Draw(None, [], np.zeros(0))
        self._last_profile = 0
        self._new_tiers = False

    # --- profiling ---------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Profile the fleet, or find the nodes of a checkpoint's tiers again."""
        online = wait_for_nodes(run.grid, self.num_tiers, WAIT_S)
        if self.tiers.latency:
            self._find_again(run.grid, online)
        elif len(online) < self.num_tiers:
            rule = f"be at most the number of nodes, {len(online)}"
            raise invalid("num_tiers", self.num_tiers, rule)
        else:
            self._profile(run.grid, online, server_round=0)

    def _find_again(self, grid: Grid, online: Set[int]) -> None:
        identify_nodes(self, grid, self.t_max)
        self.joiners.set_known(node for node in online if self.identity(node) in self.tiers.latency)
        if not any(self.session.registry.find(name) in online for name in self.tiers.tier):
            text = "TiFL: none of the %d nodes with a tier was found again among %d online"
            log(WARNING, text, len(self.tiers.tier), len(online))

    def _profile(self, grid: Grid, online: Set[int], server_round: int) -> None:
        """Profile all nodes and group them (section 4.2); the state of Algorithm 2 goes on."""
        self._last_profile = server_round
        registry = self.session.registry
        registry.learn(grid)
        nodes, rounds = profile_nodes(
            self,
            grid,
            sorted(online),
            server_round=server_round,
            sync_rounds=self.sync_rounds,
            warmup_rounds=self.warmup_rounds,
            t_max=self.t_max,
        )
        found = tier_fleet(nodes, rounds, registry, self.t_max, self.tiering, self.num_tiers)
        if found is None:
            what = f"TiFL: no node answered the profiling within t_max={self.t_max:g} s"
            if not self.tiers.latency:
                raise RuntimeError(f"{what}: check the ClientApp's log, or raise t_max.")
            log(WARNING, "%s: the tiers stay as they are", what)
            return
        tiers, tiering, rounds = found
        state = self._first_state(tiering.latency)
        if self.tiers.latency and len(self.state.probs) == len(state.probs):
            state = self.state._replace(full_credits=state.full_credits)
        self.tiers, self.state, self._new_tiers = tiers, state, True
        self.estimate.set_tiers(rounds, tiering, self.num_selected)
        self.failures.clear()
        self.joiners.set_known(online)

    def _first_state(self, latency: Floats) -> TierState:
        """Set probabilities and credits for tiers of this latency (Alg. 2, l. 1)."""
        if isinstance(self.policy, str):
            probs = policy_probs(self.policy, len(latency))
        else:
            probs = resample(policy_probs(self.policy, self.num_tiers), len(latency))
        credits = self.credits
        if isinstance(credits, int):  # with fewer tiers than asked for, the same sum
            credits = -(-credits * self.num_tiers // len(latency))
        full_credits = start_credits(credits, latency)
        log(INFO, "TiFL: credits of the tiers until they are refilled: %s", full_credits.tolist())
        return TierState.first(probs, full_credits)

    # --- selection ---------------------------------------------------------------------

    def select(self, server_round: int, grid: Grid, online: Set[int]) -> list[int]:
        """Profile if it is due, place late joiners, draw a tier and nodes of it."""
        every = self.profile_interval or np.inf
        if not self.tiers.latency or server_round - self._last_profile >= every:
            self._profile(grid, online, server_round)
        else:
            self.joiners.update(grid, online, self.tiers, server_round)
        available = self._available(online)
        self.draw, self.state = draw_nodes(
            self.tiers, self.state, available, self.num_selected, self.borrow, self.rng
        )
        self.estimate.expect_round(self.draw.probs)
        log(INFO, "TiFL: tier %s, %d nodes", self.draw.tier, len(self.draw.nodes))
        return self.draw.nodes

    def select_for_evaluation(self, server_round: int, grid: Grid) -> list[int]:
        """Sample every tier when accuracies are due, else take the nodes just trained."""
        if not self._is_evaluation_due(server_round):
            return super().select_for_evaluation(server_round, grid)
        available = self._available(online_nodes(grid))
        return self.tiers.sample_each(EVALUATE_PER_TIER, available, self.rng)

    def _available(self, online: Set[int]) -> Available:
        blocked, find = self.failures.blocked, self.session.registry.find

        def available(identity: str) -> int | None:
            node_id = find(identity)
            return node_id if node_id in online and identity not in blocked else None

        return available

    def _is_evaluation_due(self, server_round: int) -> bool:
        return self.adaptive and server_round % self.interval == 0  # Alg. 2, l. 3

    # --- replies -----------------------------------------------------------------------

    def on_outcome(self, server_round: int, good: dict[str, Outcome], failed: list[str]) -> None:
        """Count failures in a row; a tier of which no reply counts gets its credit back."""
        self.estimate.actual_s += self.session.exchange.virtual_s
        self.failures.record_training(set(good), set(failed))
        if not good and self.draw.tier is not None:
            self.state = refund(self.state, self.draw.tier)

    def on_evaluate_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn the tiers' accuracies when they are due."""
        if self._is_evaluation_due(server_round):
            names = [self.identity(reply.metadata.src_node_id) for reply in replies]
            metrics = [next(iter(reply.content.metric_records.values())) for reply in replies]
            reported = dict(zip(names, metrics, strict=True))
            weight_key = getattr(self.leaf, "weighted_by_key", "num-examples")
            accuracy = accuracy_per_tier(reported, self.tiers, self.accuracy_key, weight_key)
            self.state = update_probs(self.state, accuracy, self.draw.tier)
        return replies

    def on_evaluate_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Count failures of nodes that only evaluate."""
        if good:  # else it may be the ClientApp that cannot evaluate
            self.failures.record_evaluation(set(failed))

    # --- history and state -------------------------------------------------------------

    def on_finish(self, run: Run) -> None:
        """Log the time estimate against the actual time."""
        self.estimate.log_summary()

    def round_info(self) -> dict[str, Any]:
        """Return tier, probabilities, credits, accuracies and estimate; new tiers in full."""
        info = {
            "tier": self.draw.tier,
            "tier_probs": self.state.probs.tolist(),
            "credits": _finite_or_none(self.state.credits),
            "tier_accuracy": _finite_or_none(self.state.accuracy),
            **self.estimate.info(),
        }
        if self._new_tiers:
            info |= self.tiers.info()
            if self.session.registry.devices:
                info["devices"] = self.session.registry.devices
            self._new_tiers = False
        return info

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        text = "\t├──> TiFL: %d nodes a round, %d tiers, policy %s, credits %s"
        log(INFO, text, self.num_selected, self.num_tiers, self.policy, self.credits)
        super().summary()

    def state_dict(self) -> StateDict:
        """Return tiers, the state of Algorithm 2, estimate, failures and generator."""
        return {
            "tiers": json.dumps(self.tiers.info()),
            "failures": json.dumps(self.failures.failures),
            "last_profile": self._last_profile,
            "rng": rng_to_str(self.rng),
            **{f"state/{name}": row for name, row in self.state._asdict().items()},
            **{f"estimate/{name}": value for name, value in vars(self.estimate).items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes are found again by their identity."""
        check_state(state, STATE, "TiFL")
        self.tiers = Tiers.from_json(str(state["tiers"]))
        self.state = TierState(**entries_below("state/", state))  # type: ignore[arg-type]
        self.estimate = TimeEstimate(**entries_below("estimate/", state))  # type: ignore[arg-type]
        self.failures.failures = json.loads(str(state["failures"]))
        self._last_profile = int(state["last_profile"])
        self.rng = rng_from_str(str(state["rng"]))


def _finite_or_none(row: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in row.tolist()]
