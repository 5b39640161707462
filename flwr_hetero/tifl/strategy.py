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
from flwr_hetero.errors import check_choice, check_count, invalid
from flwr_hetero.server.client_support import TIMES, ClientSupport
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import WAIT_S, wait_for_nodes, whole_grid
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.selection import Outcome
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str
from flwr_hetero.tifl.algorithm import (
    ADAPTIVE,
    ALGORITHM_2,
    PACED,
    VANILLA,
    Draw,
    TierState,
    carry_over,
    first_state,
    policy_probs,
    refund,
    select,
)
from flwr_hetero.tifl.evaluation import TierEvaluation
from flwr_hetero.tifl.latencies import STATE as TIMES_STATE
from flwr_hetero.tifl.latencies import Latencies
from flwr_hetero.tifl.pacing import MOST_DUE, Forecast, TimeEstimate, paced_credits, steer
from flwr_hetero.tifl.tiers import T_MAX, Tiers

TIERS = ("latency", "tier", "boundaries", "seconds", "slowest_s", "slowest_s2")
HELD = ("tiers", "state", "estimate", "due", "evaluated")
STATE = {**dict.fromkeys((*HELD, "rng"), str), **TIMES_STATE}
"""Entries of a saved TiFL."""


class TiFL(TierEvaluation):
    """Group nodes into tiers by latency and let one tier train each round.

    The tier is drawn from fixed probabilities (static) or from ones that favour low accuracy and
    short rounds (adaptive). Nodes are timed while they train: round 1 asks all,
    goes on with the first ``clients_per_round`` replies and leaves the others to finish.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates, with ``fraction_train`` 1; FedAvg if left out.
    clients_per_round, num_tiers : int
        Nodes |C| that train each round; tiers wanted, fewer if there are fewer latencies.
    policy : str or sequence of float
        ``adaptive`` (by error and latency), ``algorithm-2`` (the paper's adaptive rule),
        ``paced`` (by latency), ``vanilla`` (no tiers), ``slow``, ``uniform``, ``random``,
        ``fast``, ``fast1``, ``fast2``, ``fast3``, or one probability per tier, fastest first.
    profiling : {"training", "phase"}
        Time nodes while they train, or as in the paper before the first round.
    sync_rounds, warmup_rounds : int
        Rounds of the phase that count, and those before them that do not.
    profile_interval : int, optional
        Form the tiers again every so many rounds, of the latencies measured in training (None:
        every 10) or of a new phase (None: never); nodes that kept failing then try again.
    interval : int
        Rounds between two evaluations of all tiers (adaptive, algorithm-2).
    credits : int or sequence of int, optional
        Rounds that each tier may train at most in the whole run, one for all or one per tier.
    seed : int
        Of tier and node selection.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy selects nodes itself.

    Notes
    -----
    "adaptive" and "paced" are not in the paper, which leaves credits and ChangeProbs open. A round
    takes one credit (as printed two), and none if no reply counts; a tier is drawn once among those
    with credits and nodes (as printed it may never end); the same 10 nodes of each tier evaluate.

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
    client_support = (TIMES,)

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        num_tiers: int = 5,
        *,
        policy: str | Sequence[float] = ADAPTIVE,
        profiling: str = "training",
        sync_rounds: int = 3,
        warmup_rounds: int = 1,
        profile_interval: int | None = None,
        interval: int = 10,
        credits: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.named = policy if isinstance(policy, str) else ""
        self.num_selected = check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = check_count("num_tiers", 1 if self.named == VANILLA else num_tiers, 1)
        policy_probs(policy, self.num_tiers)
        self.policy = self.named or [float(p) for p in policy]
        if profile_interval is not None:
            check_count("profile_interval", profile_interval, 1)
        self.interval = check_count("interval", interval, 1)
        if self.named == PACED and credits is not None:
            raise invalid("credits", credits, "be None, for policy 'paced' has its own")
        each = credits if isinstance(credits, Sequence) else [credits] * self.num_tiers
        if len(each) != self.num_tiers:
            raise invalid("credits", credits, f"have num_tiers={self.num_tiers} entries")
        self.credits = None if credits is None else [check_count("credits", c, 1) for c in each]
        self.rng = np.random.default_rng(check_count("seed", seed))
        in_training = check_choice("profiling", profiling, ("training", "phase")) == "training"
        check_count("sync_rounds", sync_rounds, 1)
        check_count("warmup_rounds", warmup_rounds)
        if in_training and (sync_rounds, warmup_rounds) != (3, 1):
            name = "sync_rounds" if sync_rounds != 3 else "warmup_rounds"
            rule = "be left out, for nodes are timed in training"
            raise invalid(name, (sync_rounds, warmup_rounds), rule, "or give profiling='phase' too")
        self.evaluates = self.named in (ADAPTIVE, ALGORITHM_2)
        super().__init__(strategy, clients_per_round)
        phase = None if in_training else (sync_rounds, warmup_rounds)
        self.timing = Latencies(self, self.num_tiers, profile_interval, phase)
        self.tiers = Tiers({}, {})
        self.state = first_state("uniform", 1, None, 1)
        self.due, self.draw = np.zeros(1), Draw(None, [], np.zeros(0))
        self.estimate = TimeEstimate()
        self._enough: int | None
        self._new_tiers = self._is_predicted = False
        self._num_rounds, self._enough = 0, None
        self._online: Set[int] = frozenset()

    # --- tiers -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Profile the fleet if asked for, or find the nodes of a checkpoint again."""
        online = wait_for_nodes(run.grid, self.num_tiers, WAIT_S)
        self._num_rounds = run.num_rounds
        if run.round > 0 or self.tiers.latency:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, T_MAX)
            find = self.fleet.nodes.find
            if self.tiers.tier and not any(find(name) in online for name in self.tiers.tier):
                text = "TiFL: none of the %d nodes with a tier was found again among %d online"
                log(WARNING, text, len(self.tiers.tier), len(online))
            return
        if len(online) < self.num_tiers:
            rule = f"be at most the number of nodes, {len(online)}"
            raise invalid("num_tiers", self.num_tiers, rule)
        if self.credits and sum(self.credits) < run.num_rounds:
            rule = f"add up to the rounds of the run, {run.num_rounds}, at least"
            raise invalid("credits", self.credits, rule)
        if self.num_tiers > 1 and len(online) // self.num_tiers < self.num_selected:
            text = "TiFL: tiers of about %d nodes are smaller than clients_per_round=%d: give %s=%d"
            fewer = "num_tiers", max(1, len(online) // self.num_selected)
            log(WARNING, text, len(online) // self.num_tiers, self.num_selected, *fewer)
        if self.timing.phase:
            self._set_tiers(self.timing.update(run.exchange(0), run.grid, online, self.tiers))

    def _set_tiers(self, tiers: Tiers | None) -> None:
        """Take new tiers; as many as before go on with their accuracies and credits.

        Credits begin again while nodes get their first tier: tiers without a node saved theirs.
        """
        if tiers is None:
            return
        count = len(tiers.seconds)
        # l. 1, for the tiers that there are
        credits = paced_credits(tiers.seconds) if self.named == PACED else self.credits
        state = first_state(self.policy, self.num_tiers, credits, count)
        if self.tiers.latency and count == len(self.state.probs):
            goes_on = not self.timing.first
            state = carry_over(self.state, state, self.named, with_credits=goes_on)
        else:
            self.due, self.evaluated = np.zeros(count), None
        self._new_tiers |= tiers is not self.tiers
        self.tiers = tiers
        self.state = steer(state, None, tiers.seconds) if self.named == ADAPTIVE else state

    # --- selection ---------------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Form tiers if it is due, draw one and nodes of it, and add nodes to be timed."""
        self._online, timing = online, self.timing
        # 4.2: profiling and tiering can be conducted periodically
        self._set_tiers(timing.update(context, grid, online, self.tiers))
        if not (self._is_predicted or timing.forming):
            self._is_predicted, count = True, self._num_rounds - context.round + 1
            if len(self.tiers.slowest_s):
                text = "TiFL: %d rounds take about %s with the tiers' present probabilities"
                log(INFO, text, count, self.forecast(count))
        newcomers = timing.newcomers(context, grid, online, self.rng)
        self._draw()
        while not self.draw.nodes + newcomers and timing.wait(context, grid, online):
            self._set_tiers(timing.update(context, grid, online, self.tiers))
            self._draw()
        count = len(self.draw.nodes)
        self._enough = (count or min(self.num_selected, len(newcomers))) if newcomers else None
        if self.draw.tier is not None:
            self.estimate.expect(1, self.tiers, self.state, self.named, self.draw.probs)
        if newcomers:
            text = "TiFL: %d nodes are timed in this round, which takes the first %d replies"
            log(DEBUG, text, len(newcomers), self._enough)
        return self.draw.nodes + newcomers

    def _draw(self) -> None:
        """Draw a tier and nodes by Algorithm 2; two policies have weights of their own."""
        state, evaluated, weights = self.state, self.evaluated, None
        self.evaluated = None
        if self.named == PACED:
            # by the credits left, so that a period is a random permutation
            weights = state.credits if state.credits.any() else state.full_credits
        if self.named == ADAPTIVE:
            # in turn, by what each tier is due: as often as its probability says, within a round
            if evaluated is not None:
                state, evaluated = steer(state, evaluated, self.tiers.seconds), None
            self.due = np.minimum(self.due + state.probs, MOST_DUE)
            weights = np.maximum(self.due, 0.0)
        how = (self.tiers.members, self._available(self._online), self.num_selected, self.rng)
        self.draw, self.state = select(state, evaluated, *how, weights)
        if self.draw.tier is not None:
            trained = np.arange(len(self.due)) == self.draw.tier
            self.due = np.maximum(self.due - trained, -MOST_DUE)

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Set how many replies are enough; Flower's simulation can only wait for all."""
        if not is_simulation_grid(whole_grid(grid)):
            context.enough = self._enough
        return messages

    # --- replies -----------------------------------------------------------------------

    def has_support(self, context: Exchange, reply: Message, support: ClientSupport) -> bool | None:
        """Return whether a node of a simulation says how long it took; elsewhere it need not."""
        latency = context.latency_of(reply)
        if self.num_tiers == 1 or latency is None or not context.simulated or context.same_clock:
            return None
        return latency.source != "observed"

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn the latencies; go on with the first replies where that is enough."""
        # l. 17-18 are over for these nodes; l. 19-20 are the wrapped strategy's
        counted = self.timing.take(context, replies, self._enough, self._online)
        self._enough = None
        return super().on_replies(context, counted)

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Add up the time; a tier of which no reply counts gets its credit back."""
        if self.draw.tier is not None:
            self.estimate.actual_s += context.virtual_s
            # the paper is silent on rounds without a reply
            self.state = self.state if good else refund(self.state)
        self.timing.count("train", list(good), failed)
        self.timing.retry(failed)
        self._trained = good.keys() | set(failed)

    # --- history and state -------------------------------------------------------------

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Leave out of the nodes that trained those that are only timed."""
        others = {self.identity(node_id) for node_id in self.timing.left_out}
        record["selected"] = [node for node in record["selected"] if node not in others]

    def forecast(self, num_rounds: int) -> Forecast:
        """Return how long so many rounds to come will take."""
        ahead = TimeEstimate()
        ahead.expect(num_rounds, self.tiers, self.state, self.named, None)
        return ahead.forecast()

    def on_finish(self, run: Run) -> None:
        """Log the time estimate beside the actual time."""
        found = self.estimate
        if found.actual_s > 0 and found.exact_s > 0:
            text = "TiFL: expected %s, took %.4g s; by the paper's Eq. 6 %.4g s"
            log(DEBUG, text, found.forecast(), found.actual_s, found.paper_s)

    def round_info(self) -> dict[str, Any]:
        """Return tier, the chances of its draw, the rule's, credits; new tiers in full."""
        accuracy = self.state.accuracy if self.evaluated is None else self.evaluated
        rows = {"credits": self.state.credits, "tier_accuracy": accuracy}
        info = {
            "tier": self.draw.tier,
            "tier_probs": self.state.probs.tolist(),
            "tier_chances": self.draw.probs.tolist(),
            **{n: [x if np.isfinite(x) else None for x in row.tolist()] for n, row in rows.items()},
            "in_flight": len(self.fleet.nodes.in_flight),
            "paper_estimate_s": self.estimate.paper_s,
            "exact_estimate_s": self.estimate.exact_s,
            "actual_s": self.estimate.actual_s,
        }
        if self._new_tiers:
            self._new_tiers = False
            info |= self.tiers.info()
        return info

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        credits = "" if self.credits is None else f", {self.credits} credits a tier"
        text = "\t├──> TiFL: %d nodes a round, policy %s, tiers: %d%s"
        log(INFO, text, self.num_selected, self.policy, self.num_tiers, credits)
        super().summary()

    def state_dict(self) -> StateDict:
        """Return tiers, the state of Algorithm 2, estimate and generator."""
        held = {
            "tiers": {name: getattr(self.tiers, name) for name in TIERS},
            "state": self.state._asdict(),
            "estimate": vars(self.estimate),
            "due": self.due,
            "evaluated": self.evaluated,
        }
        rows = {name: json.dumps(value, default=np.ndarray.tolist) for name, value in held.items()}
        times = super().state_dict() | self.timing.state_dict()
        return {**rows, **times, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes are found again by their identity."""
        check_state(state, STATE, "TiFL")
        super().load_state_dict(state)
        held = {name: json.loads(str(state[name])) for name in HELD}
        self.tiers, self.estimate = Tiers(**held["tiers"]), TimeEstimate(**held["estimate"])
        rows = {n: np.array(row) if n != "tier" else row for n, row in held["state"].items()}
        self.state, self.due = TierState(**rows), np.array(held["due"])  # type: ignore[arg-type]
        self.evaluated = None if held["evaluated"] is None else np.array(held["evaluated"])
        self.timing.load_state_dict(state, self.tiers)
        self.rng = rng_from_str(str(state["rng"]))
