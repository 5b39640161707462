"""TiFL as a wrapper: time nodes, draw a tier and nodes of it, learn from who answered."""

import json
from collections.abc import Sequence, Set
from logging import DEBUG, INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import is_simulation_grid, log
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import WAIT_S, wait_for_nodes, whole_grid
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.selection import Outcome
from flwr_hetero.state_dict import StateDict, check_state, entries_below, rng_from_str, rng_to_str
from flwr_hetero.tifl.algorithm import (
    ADAPTIVE,
    ALGORITHM_2,
    PACED,
    VANILLA,
    Floats,
    TierState,
    check_credits,
    policy_probs,
    refund,
)
from flwr_hetero.tifl.evaluation import TierEvaluation
from flwr_hetero.tifl.failures import FailureCounter
from flwr_hetero.tifl.grouping import TIERINGS, Found, TierRule, say_small_tiers
from flwr_hetero.tifl.pacing import carry_over, draw_weights, first_state, schedule, was_drawn
from flwr_hetero.tifl.phase import Phase
from flwr_hetero.tifl.tiers import Tiers, draw_nodes, node_chances
from flwr_hetero.tifl.time_estimate import STATE as ESTIMATE_STATE
from flwr_hetero.tifl.time_estimate import TimeEstimate
from flwr_hetero.tifl.training_times import STATE as TIMING_STATE
from flwr_hetero.tifl.training_times import TrainingTimes

STATE = {
    **{"tiers": str, "rng": str, **FailureCounter.STATE},
    **TIMING_STATE,
    **{f"state/{name}": ((-1,), "f") for name in TierState._fields},
    **{f"estimate/{name}": kind for name, kind in ESTIMATE_STATE.items()},
}
"""Entries of a saved TiFL."""


class TiFL(TierEvaluation):
    """Group nodes into tiers by latency and let one tier train each round.

    The tier is drawn from fixed probabilities (static policies) or from ones that favour tiers of
    low accuracy and short rounds (adaptive). Nodes are timed while they train: round 1 asks all of
    them, goes on with the first ``clients_per_round`` replies and leaves the others to finish.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy that derives from FedAvg, or another wrapper;
        FedAvg if left out. Its ``fraction_train`` must be 1: TiFL selects.
    clients_per_round, num_tiers : int
        Nodes |C| that train each round; tiers wanted, fewer if there are fewer latencies.
    policy : str or sequence of float
        ``adaptive`` (by error and latency), ``algorithm-2`` (the paper's adaptive rule),
        ``paced`` (by latency), ``vanilla`` (no tiers), ``slow``, ``uniform``, ``random``,
        ``fast``, ``fast1``, ``fast2``, ``fast3``, or one probability per tier, fastest first.
    tiering : {"quantile", "histogram"}
        Tiers of equal size, or the paper's bins of equal width.
    profiling : {"training", "phase"}
        Time nodes while they train, or as in the paper before the first round.
    sync_rounds, warmup_rounds : int, optional
        Rounds of the phase that count (3), and those before them that do not (1).
    t_max : float
        Seconds after which a node that has not answered drops out, of a profiling round too.
    profile_interval : int, optional
        Form the tiers again every so many rounds, of the latencies measured in training (None:
        every 10) or of a new phase (None: never); failing nodes are then asked again.
    interval : int
        Rounds between two evaluations of all tiers (adaptive, algorithm-2).
    credits : int or sequence of int, optional
        Rounds that each tier may train at most in the whole run, one number for all or one per
        tier, fastest first; None: no limit.
    accuracy_key : str, optional
        Metric of the evaluation replies of which more is better; None: the first with "acc" in
        its name, else minus the first with "loss" in its name.
    on_small_tier : {"shrink", "borrow"}
        With fewer than |C| nodes of the tier online: train fewer, or add nodes of faster tiers.
    unbiased : bool
        Whether nodes count by their examples under each policy; as for :class:`Selection`.
    max_failures : int
        Failures in a row after which a node is left out until tiers are formed again.
    seed : int
        Of tier and node selection.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy cannot leave selection to TiFL.

    Notes
    -----
    "adaptive" and "paced" are not in the paper. Deviations of "algorithm-2" from it: one credit per
    round (as printed two), one draw over the tiers that have credits and nodes (as printed it may
    never end), credits given back where no reply counts, the same 10 nodes of each tier evaluated
    each time and only in the rounds whose figures are compared, quantile tiers by default. The
    paper leaves the credits and ChangeProbs open.

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
    ValueError: policy must be one of adaptive, algorithm-2, ..., got 'warp'.
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
        profiling: str = "training",
        sync_rounds: int | None = None,
        warmup_rounds: int | None = None,
        t_max: float = 600.0,
        profile_interval: int | None = None,
        interval: int = 10,
        credits: int | Sequence[int] | None = None,
        accuracy_key: str | None = None,
        on_small_tier: str = "shrink",
        unbiased: bool = False,
        max_failures: int = 3,
        seed: int = 0,
    ) -> None:
        named = policy if isinstance(policy, str) else ""
        self.num_selected = check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = 1 if named == VANILLA else check_count("num_tiers", num_tiers, 1)
        policy_probs(policy, self.num_tiers)
        self.policy, self.named = named or [float(p) for p in policy], named
        check_choice("tiering", tiering, TIERINGS)
        rule = TierRule(tiering, self.num_tiers, check_number("t_max", t_max, "(0, inf)"))
        if profile_interval is not None:
            check_count("profile_interval", profile_interval, 1)
        self.interval = check_count("interval", interval, 1)
        if named == PACED and credits is not None:
            raise invalid("credits", credits, "be None, for policy 'paced' has its own")
        credits = check_credits(credits, self.num_tiers)
        self.credits, self.accuracy_key = credits, accuracy_key
        check_choice("on_small_tier", on_small_tier, ("shrink", "borrow"))
        self.borrow = on_small_tier == "borrow"
        self.failures = FailureCounter(check_count("max_failures", max_failures, 1))
        self.rng = np.random.default_rng(check_count("seed", seed))
        in_training = check_choice("profiling", profiling, ("training", "phase")) == "training"
        phase = {"sync_rounds": sync_rounds, "warmup_rounds": warmup_rounds}
        for option, value in phase.items():
            if in_training and value is not None:
                hint = "or give profiling='phase' too"
                raise invalid(option, value, "be left out, for nodes are timed in training", hint)
        settings = {"evaluates": named in (ADAPTIVE, ALGORITHM_2), "unbiased": unbiased}
        super().__init__(strategy, clients_per_round, fixed_size=self.borrow, **settings)
        if in_training and any(getattr(s, "accountant", None) for s in self.chain()):
            raise invalid("profiling", profiling, "be 'phase' where privacy is accounted for")
        how = (self, rule, profile_interval, self.failures)
        self.timing = TrainingTimes(*how) if in_training else Phase(*how, *phase.values())
        self.estimate = TimeEstimate()
        self._new_tiers = self._is_predicted = False
        self._num_rounds = 0
        self._enough: int | None = None
        self._online: Set[int] = frozenset()

    # --- tiers -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Profile the fleet if asked for, or find the nodes of a checkpoint again."""
        online = wait_for_nodes(run.grid, self.num_tiers, WAIT_S)
        self._num_rounds = run.num_rounds
        if run.round > 0 or self.tiers.latency:
            self._find_again(run, online)
            return
        if len(online) < self.num_tiers:
            rule = f"be at most the number of nodes, {len(online)}"
            raise invalid("num_tiers", self.num_tiers, rule)
        if self.credits and sum(self.credits) < run.num_rounds:
            rule = f"add up to the rounds of the run, {run.num_rounds}, at least"
            raise invalid("credits", self.credits, rule)
        if not self.borrow:
            say_small_tiers(len(online), self.num_tiers, self.num_selected)
        self._set_tiers(self.timing.start(run.exchange(0), run.grid, online))

    def _find_again(self, run: Run, online: Set[int]) -> None:
        identify_nodes(self, run.exchange(run.round + 1), run.grid, self.timing.rule.t_max)
        find = self.fleet.nodes.find
        if self.tiers.tier and not any(find(name) in online for name in self.tiers.tier):
            text = "TiFL: none of the %d nodes with a tier was found again among %d online"
            log(WARNING, text, len(self.tiers.tier), len(online))

    def _set_tiers(self, found: Found | None) -> None:
        """Take new tiers; as many as before go on with their accuracies and credits.

        Credits begin again while nodes get their first tier: tiers without a node saved theirs.
        """
        if found is None:
            return
        state = first_state(self.policy, self.num_tiers, self.credits, found.tiering.latency)
        if self.tiers.latency:
            state = carry_over(self.state, state, self.named, with_credits=not found.first)
        self._new_tiers |= found.tiers is not self.tiers
        self.tiers, self.state = found.tiers, state
        if found.is_timed:
            self.estimate.set_tiers(found.rounds, found.tiering.tier, self.num_selected)

    # --- selection ---------------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Form tiers if it is due, draw one and nodes of it, and add nodes to be timed."""
        self._online, timing = online, self.timing
        self._set_tiers(timing.update(context, grid, online, self.tiers))
        if not (self._is_predicted or timing.forming):
            self._is_predicted, count = True, self._num_rounds - context.round + 1
            self.estimate.log_forecast(count, self.state, self.named)
        newcomers = timing.newcomers(context, grid, online, self.rng)
        self._draw()
        while not self.draw.nodes + newcomers and timing.wait(context, grid, online):
            self._set_tiers(timing.update(context, grid, online, self.tiers))
            self._draw()
        count = len(self.draw.nodes)
        self._enough = (count or min(self.num_selected, len(newcomers))) if newcomers else None
        if self.draw.tier is not None:
            self.estimate.expect(1, self.state, self.named, self.draw.probs)
        if newcomers:
            text = "TiFL: %d nodes are timed in this round, which takes the first %d replies"
            log(DEBUG, text, len(newcomers), self._enough)
        return self.draw.nodes + newcomers

    def _draw(self) -> None:
        weights, state = draw_weights(self.state, self.named)
        how = (self._available(self._online), self.num_selected, self.borrow, self.rng)
        self.draw, self.state = draw_nodes(self.tiers, state, weights, *how)
        if self.draw.tier is not None:
            self.state = was_drawn(self.state, self.draw.tier)

    def tier_chances(self) -> Floats:
        """Return the probability with which each tier trains in this round: (num_tiers,)."""
        return schedule(self.state, self.named, self.draw.probs)

    def node_chances(self, context: Exchange, online: Set[int]) -> dict[int, float]:
        """Return the chance of each node; not known where the first to answer are taken."""
        known = self._enough is None and self.draw.tier is not None
        how = (self.tier_chances(), self.num_selected, self._available(online))
        return node_chances(self.tiers, *how) if known else {}

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Set how many replies are enough; Flower's simulation can only wait for all."""
        context.enough = None if is_simulation_grid(whole_grid(grid)) else self._enough
        return messages

    # --- replies -----------------------------------------------------------------------

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn the latencies; go on with the first replies where that is enough."""
        counted = self.timing.take(context, replies, self._enough, self._online)
        self._enough = None
        return super().on_replies(context, list(counted))

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Count failures in a row; a tier of which no reply counts gets its credit back."""
        if self.draw.tier is not None:
            self.estimate.actual_s += context.virtual_s
        self.failures.record_training(set(good), set(failed))
        self.timing.retry(failed)
        if not good and self.draw.tier is not None:
            self.state = refund(self.state, self.draw.tier)

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Leave out of the nodes that trained those that are only timed."""
        others = {self.identity(node_id) for node_id in self.timing.left_out}
        record["selected"] = [node for node in record["selected"] if node not in others]

    # --- history and state -------------------------------------------------------------

    def on_finish(self, run: Run) -> None:
        """Log the time estimate beside the actual time."""
        self.estimate.log_summary()

    def round_info(self) -> dict[str, Any]:
        """Return tier, the chances of its draw, the rule's, credits; new tiers in full."""
        info = {
            "tier": self.draw.tier,
            "tier_probs": self.state.probs.tolist(),
            "tier_chances": self.draw.probs.tolist(),
            "credits": _finite_or_none(self.state.credits),
            "still_at_work": len(self.fleet.nodes.in_flight),
            "tier_accuracy": _finite_or_none(self.state.accuracy),
            **self.estimate.info(),
        }
        if self._new_tiers:
            info |= self.tiers.info()
            if self.fleet.nodes.devices:
                info["devices"] = self.fleet.nodes.devices
            self._new_tiers = False
        return info

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        credits = "" if self.credits is None else f", {self.credits} credits a tier"
        text = "\t├──> TiFL: %d nodes a round, policy %s, tiers: %d%s"
        log(INFO, text, self.num_selected, self.policy, self.num_tiers, credits)
        super().summary()

    def state_dict(self) -> StateDict:
        """Return tiers, the state of Algorithm 2, estimate, failures and generator."""
        return {
            "tiers": json.dumps(self.tiers.info()),
            **self.failures.state_dict(),
            **super().state_dict(),
            **self.timing.state_dict(),
            "rng": rng_to_str(self.rng),
            **{f"state/{name}": row for name, row in self.state._asdict().items()},
            **{f"estimate/{name}": value for name, value in vars(self.estimate).items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes are found again by their identity."""
        check_state(state, STATE, "TiFL")
        super().load_state_dict(state)
        self.tiers = Tiers.from_json(str(state["tiers"]))
        self.state = TierState(**entries_below("state/", state))  # type: ignore[arg-type]
        self.estimate = TimeEstimate(**entries_below("estimate/", state))  # type: ignore[arg-type]
        self.failures.load_state_dict(state)
        self.timing.load_state_dict(state, self.tiers)
        self.rng = rng_from_str(str(state["rng"]))


def _finite_or_none(row: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in row.tolist()]
