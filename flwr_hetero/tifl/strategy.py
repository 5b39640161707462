"""TiFL as a wrapper: time nodes, draw a tier and nodes of it, learn from who answered."""

import json
from collections.abc import Callable, Sequence, Set
from logging import DEBUG, INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_choice, check_count, invalid
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.exchange.nodes import WAIT_S, online_nodes, wait_for_nodes
from flwr_hetero.records import metrics_in
from flwr_hetero.server.client_support import TIMES, ClientSupport
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.selection import Outcome, Selection
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str
from flwr_hetero.tifl import algorithm
from flwr_hetero.tifl.algorithm import ADAPTIVE, ALGORITHM_2, PACED, VANILLA, Draw, Floats
from flwr_hetero.tifl.tiers import STATE as TIMES_STATE
from flwr_hetero.tifl.tiers import T_MAX, Latencies, Tiers

TIERS = ("latency", "tier", "boundaries", "seconds")
HELD = ("tiers", "state", "due", "evaluated", "actual_s")
STATE = {**dict.fromkeys((*HELD, "rng"), str), **TIMES_STATE}


class TiFL(Selection):
    """Group nodes into tiers by latency, and train the nodes of one tier in each round.

    The tier is drawn with fixed probabilities, or with probabilities that favour low accuracy and
    speed. Nodes are timed while they train: round 1 asks all nodes and goes on with the first
    replies. Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020. The policies
    "adaptive" and "paced" are our own. ValueError for a setting out of range, or a wrapped strategy
    that selects nodes itself.

    >>> strategy = TiFL(clients_per_round=5, policy="fast1")

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates, with ``fraction_train`` 1; FedAvg if left out. It is copied,
        and the copy evaluates if the policy needs accuracies: see :class:`Wrapper`.
    clients_per_round : int
        Number |C| of nodes that train in a round.
    num_tiers : int
        Largest number of tiers. There are fewer if there are fewer latencies.
    policy : str or sequence of float
        ``adaptive`` (by error and latency), ``algorithm-2`` (the paper's adaptive rule),
        ``paced`` (by latency), ``vanilla`` (no tiers), ``slow``, ``uniform``, ``random``, ``fast``,
        ``fast1``, ``fast2``, ``fast3``, or one probability for each tier, the fastest first.
    profiling : {"training", "phase"}
        Time nodes while they train, or before the first round, as in the paper.
    sync_rounds, warmup_rounds : int
        Number of rounds in the phase that are timed, and of the rounds before them that are not.
    profile_interval : int, optional
        Number of rounds after which tiers are formed again, from the latencies measured in training
        (None: 10 rounds) or in a new phase (None: never). Excluded nodes are then tried again.
    interval : int
        Number of rounds between two evaluations of all tiers (adaptive, algorithm-2).
    credits : int or sequence of int, optional
        Largest number of rounds of each tier in the run: one number for all tiers, or one for each
        tier. Not with ``paced``.
    seed : int
        Seed of the selection of tiers and nodes.
    """

    name: ClassVar[str] = "tifl"
    client_support = (TIMES,)
    clients_per_round: int

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
        check_count("clients_per_round", clients_per_round, 1)
        self.num_tiers = check_count("num_tiers", 1 if self.named == VANILLA else num_tiers, 1)
        algorithm.check_policy(policy, self.num_tiers)
        self.policy = self.named or [float(p) for p in policy]
        if profile_interval is not None:
            check_count("profile_interval", profile_interval, 1)
        self.profile_interval = profile_interval
        self.interval = check_count("interval", interval, 1)
        if self.named == PACED and credits is not None:
            raise invalid("credits", credits, "be None, for policy 'paced' has its own")
        each = credits if isinstance(credits, Sequence) else [credits] * self.num_tiers
        if len(each) != self.num_tiers:
            raise invalid("credits", credits, f"have num_tiers={self.num_tiers} entries")
        self.credits = None if credits is None else [check_count("credits", c, 1) for c in each]
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        self.profiling = check_choice("profiling", profiling, ("training", "phase"))
        self.sync_rounds = check_count("sync_rounds", sync_rounds, 1)
        self.warmup_rounds = check_count("warmup_rounds", warmup_rounds)
        phase = (sync_rounds, warmup_rounds) if profiling == "phase" else None
        if phase is None and (sync_rounds, warmup_rounds) != (3, 1):
            rule = "be left out, for nodes are timed in training"
            hint = "or give profiling='phase' too"
            given = (sync_rounds, warmup_rounds)
            raise invalid("sync_rounds", given, rule, hint)
        self.evaluates = self.named in (ADAPTIVE, ALGORITHM_2)
        super().__init__(strategy, clients_per_round)
        self.timing = Latencies(self, self.num_tiers, profile_interval, phase)
        self.tiers = Tiers({}, {})
        self.state = algorithm.first_state("uniform", 1, None, 1)
        self.due = np.zeros(1)
        self.draw = Draw(None, [], np.zeros(0))
        # The accuracies on which the next draw depends.
        self.evaluated: Floats | None = None
        # The total time of the rounds of tiers, in seconds.
        self.actual_s = 0.0
        self._new_tiers = False
        self._enough: int | None = None
        self._online: Set[int] = frozenset()

    def on_start(self, run: Run) -> None:
        """Profile the fleet if there is a phase, or identify the nodes of a checkpoint."""
        online = wait_for_nodes(run.grid, self.num_tiers, WAIT_S)
        if run.round > 0 or self.tiers.latency:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, T_MAX)
            return
        if len(online) < self.num_tiers:
            rule = f"be at most the number of nodes, {len(online)}"
            raise invalid("num_tiers", self.num_tiers, rule)
        if self.credits and sum(self.credits) < run.num_rounds:
            rule = f"add up to the rounds of the run, {run.num_rounds}, at least"
            raise invalid("credits", self.credits, rule)
        if self.timing.phase:
            self._set_tiers(self.timing.update(run.exchange(0), run.grid, online, self.tiers))

    def _set_tiers(self, tiers: Tiers | None) -> None:
        """Take new tiers, which keep accuracies and credits if their number is the same."""
        if tiers is None:
            return
        count = len(tiers.seconds)
        # l. 1, for the tiers that exist.
        credits = algorithm.paced_credits(tiers.seconds) if self.named == PACED else self.credits
        state = algorithm.first_state(self.policy, self.num_tiers, credits, count)
        if self.tiers.latency and count == len(self.state.probs):
            # While nodes get their first tier, the credits of tiers without nodes are kept.
            goes_on = not self.timing.first
            state = algorithm.carry_over(self.state, state, self.named, with_credits=goes_on)
        else:
            self.due = np.zeros(count)
            self.evaluated = None
        if tiers is not self.tiers:
            self._new_tiers = True
            sizes = [len(names) for names in tiers.members]
            why = f": {tiers.why_so_few}" if tiers.why_so_few else ""
            level = WARNING if why else DEBUG if self.timing.late else INFO
            log(level, "TiFL: tiers of %s nodes, fastest first%s", sizes, why)
        if self.named == ADAPTIVE:
            state = algorithm.steer(state, None, tiers.seconds, tiers.sizes)
        self.tiers = tiers
        self.state = state

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Form tiers if they are due, draw a tier and its nodes, and add nodes to be timed."""
        self._online = online
        timing = self.timing
        # 4.2: profiling and tiering can be conducted periodically
        self._set_tiers(timing.update(context, grid, online, self.tiers))
        newcomers = timing.newcomers(context, grid, online, self.rng)
        self._draw()
        while not self.draw.nodes + newcomers and timing.wait(context, grid, online):
            self._set_tiers(timing.update(context, grid, online, self.tiers))
            self._draw()
        few = len(self.draw.nodes) or min(self.clients_per_round, len(newcomers))
        self._enough = few if newcomers else None
        return self.draw.nodes + newcomers

    def _draw(self) -> None:
        """Draw a tier and nodes by Algorithm 2; two policies use other weights."""
        state = self.state
        evaluated = self.evaluated
        weights = None
        self.evaluated = None
        if self.named == PACED:
            # Remaining credits are the weights, so that a period is a random permutation.
            weights = state.credits if state.credits.any() else state.full_credits
        if self.named == ADAPTIVE:
            # Weighted round-robin: each tier accumulates its probability until it is drawn.
            if evaluated is not None:
                seconds = self.tiers.seconds
                sizes = self.tiers.sizes
                state = algorithm.steer(state, evaluated, seconds, sizes)
                evaluated = None
            self.due = np.minimum(self.due + state.probs, algorithm.MOST_DUE)
            weights = np.maximum(self.due, 0.0)
        self.draw, self.state = algorithm.select(
            state,
            evaluated,
            self.tiers.members,
            self._available(self._online),
            self.clients_per_round,
            self.rng,
            weights,
        )
        if self.draw.tier is not None:
            trained = np.arange(len(self.due)) == self.draw.tier
            self.due = np.maximum(self.due - trained, -algorithm.MOST_DUE)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Set how many replies are enough."""
        context.enough = self._enough
        return messages

    def _free(self, online: Set[int]) -> Callable[[int | None], bool]:
        """Return a function that tells whether a node may be asked."""
        nodes = self.fleet.nodes
        busy = {nodes.find(name) for name in self.timing.blocked}
        if self.fleet.queue is not None:
            busy |= self.fleet.queue.busy.keys()
        return lambda node_id: node_id in online and node_id not in busy

    def _available(self, online: Set[int]) -> algorithm.Available:
        find = self.fleet.nodes.find
        free = self._free(online)
        return lambda identity: node_id if free(node_id := find(identity)) else None

    def has_support(self, context: Exchange, reply: Message, support: ClientSupport) -> bool | None:
        """Return whether a node of a simulation reports its time; other nodes need not."""
        latency = context.latency_of(reply)
        if self.num_tiers == 1 or latency is None or not context.simulated or context.same_clock:
            return None
        return latency.source != "observed"

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Learn the latencies, and pass on the first replies if these are enough."""
        # These nodes have done l. 17-18, and the wrapped strategy does l. 19-20.
        counted = self.timing.take(context, replies, self._enough, self._online)
        return super().on_replies(context, counted)

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Add up the time; a tier without a good reply gets its credit back."""
        if self.draw.tier is not None:
            self.actual_s += context.virtual_s
            # The paper does not discuss rounds without a reply.
            self.state = self.state if good else algorithm.refund(self.state)
        self.timing.count(list(good), failed)

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Return all free nodes; if only TiFL evaluates, the same ones of each tier."""
        online = online_nodes(grid)
        if not self._inner_evaluates:
            return self.tiers.panel(self._available(online)) if self._is_due(context.round) else []
        free = list(filter(self._free(online), online))
        # The wrapped strategy would wait indefinitely for more nodes than are free.
        leaf: Any = self.leaf
        leaf.min_evaluate_nodes = min(self._min_evaluate_nodes, len(free))
        return free

    def _is_due(self, server_round: int) -> bool:
        if not (self.evaluates and self.tiers.latency):
            return False
        first = self.named == ALGORITHM_2 and bool(np.isnan(self.state.accuracy).all())
        # Alg. 2, l. 3
        return first or server_round % self.interval == 0

    def on_evaluate_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Learn the tiers' accuracies when they are due."""
        if self._is_due(context.round):
            # Alg. 2, l. 21-22: for each tier
            metrics = [next(iter(metrics_in(reply.content).values())) for reply in replies]
            names = [self.identity(reply.metadata.src_node_id) for reply in replies]
            reported = dict(zip(names, metrics, strict=True))
            weight_key = getattr(self.leaf, "weighted_by_key", "num-examples")
            self.evaluated = self.tiers.accuracy(reported, weight_key)
        return replies

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Remove the nodes that were only timed from the nodes that trained."""
        others = {self.identity(node_id) for node_id in self.timing.left_out}
        record["selected"] = [node for node in record["selected"] if node not in others]

    def round_info(self) -> dict[str, Any]:
        """Return the tier, its probabilities and credits, and all tiers if they are new."""
        known = self.state.accuracy if self.evaluated is None else self.evaluated
        rows = {"credits": self.state.credits, "tier_accuracy": known}
        info = {
            "tier": self.draw.tier,
            "tier_probs": self.state.probs.tolist(),
            "tier_chances": self.draw.probs.tolist(),
            **{n: [x if np.isfinite(x) else None for x in row.tolist()] for n, row in rows.items()},
            "in_flight": len(self.timing.late),
            "actual_s": self.actual_s,
        }
        if self._new_tiers:
            self._new_tiers = False
            tiers = self.tiers
            dropouts = sorted(set(tiers.latency) - set(tiers.tier))
            info |= {"tiers": tiers.tier, "latency": tiers.latency, "dropouts": dropouts}
        return info

    def state_dict(self) -> StateDict:
        """Return the tiers, the state of Algorithm 2 and the state of the generator."""
        held = {
            "tiers": {name: getattr(self.tiers, name) for name in TIERS},
            "state": self.state._asdict(),
            "due": self.due,
            "evaluated": self.evaluated,
            "actual_s": self.actual_s,
        }
        rows = {name: json.dumps(value, default=np.ndarray.tolist) for name, value in held.items()}
        return rows | self.timing.state_dict() | {"rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes are recognised by their identity."""
        check_state(state, STATE, "TiFL")
        held = {name: json.loads(str(state[name])) for name in HELD}
        # Earlier versions have saved more.
        self.tiers = Tiers(**{name: held["tiers"][name] for name in TIERS})
        self.actual_s = held["actual_s"]
        rows = {n: np.array(row) if n != "tier" else row for n, row in held["state"].items()}
        self.state = algorithm.TierState(**rows)  # type: ignore[arg-type]
        self.due = np.array(held["due"])
        self.evaluated = None if held["evaluated"] is None else np.array(held["evaluated"])
        self.timing.load_state_dict(state, self.tiers)
        self.rng = rng_from_str(str(state["rng"]))
