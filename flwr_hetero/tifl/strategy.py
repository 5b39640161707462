"""Make a wrapped strategy train exactly the nodes that it is shown."""

import json
from collections.abc import Iterable, Sequence, Set
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero._flwr import chooses_one_node, log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.nodes import GridView, online_nodes, wait_for_nodes
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, rng_from_str, rng_to_str
from flwr_hetero.tifl.algorithm import VANILLA, Rule, privacy_report, sampling_rates
from flwr_hetero.tifl.membership import Joiners, TieringSettings, tier_fleet
from flwr_hetero.tifl.tiers import (
    ADAPTIVE,
    ChooserSettings,
    Fleet,
    TierChooser,
    TierTable,
    accuracy_per_tier,
    draw_nodes,
    sample_tiers,
)
from flwr_hetero.tifl.time_estimate import TimeEstimate

if TYPE_CHECKING:
    from flwr_hetero.server.wrapper import Wrapper


def open_selection(
    wrapper: "Wrapper", clients_per_round: int, *, evaluate: bool, shrink: str
) -> bool:
    """Check the innermost strategy's own sampling and open it.

    Flower's ``sample_nodes`` waits for ever for nodes that a view hides, so anything that
    could make it wait is refused here, and the minima are set to 1.
    """
    leaf: Any = wrapper.leaf
    kind = type(leaf).__name__
    if not isinstance(leaf, FedAvg) or chooses_one_node(leaf):
        raise invalid(
            "strategy",
            kind,
            "derive from FedAvg and leave the choice of nodes open",
            "FedXgbCyclic and strategies with a selection of their own do not fit",
        )
    if leaf.fraction_train != 1.0:
        raise invalid(
            f"{kind}.fraction_train",
            leaf.fraction_train,
            "be 1.0 inside TiFL",
            "leave it out and set clients_per_round",
        )
    for minimum in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        wanted = getattr(leaf, minimum)
        if wanted > max(clients_per_round, 2):  # 2 is Flower's default: nobody asked for it
            raise invalid(
                f"{kind}.{minimum}",
                wanted,
                f"be at most clients_per_round={clients_per_round}",
                "it would wait for ever for nodes that TiFL does not show; leave it out",
            )
    for outer in wrapper.chain():
        accountant = getattr(outer, "accountant", None)
        asked = getattr(outer, "num_sampled_clients", clients_per_round)
        if accountant is not None and (asked != clients_per_round or shrink == "shrink"):
            raise invalid(
                f"{type(outer).__name__}.num_sampled_clients",
                asked,
                f"equal clients_per_round={clients_per_round}, with on_small_tier borrow or skip",
                "privacy accounting needs rounds of one size",
            )
    wanted_evaluation = bool(leaf.fraction_evaluate > 0)
    leaf.min_train_nodes = leaf.min_available_nodes = 1
    if wanted_evaluation or evaluate:
        leaf.min_evaluate_nodes = 1
    if evaluate and not wanted_evaluation:
        leaf.fraction_evaluate = 1.0
    return wanted_evaluation


class Probation:
    """Count each node's failures in a row."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.strikes: dict[str, int] = {}
        self._judged: Set[str] = frozenset()

    @property
    def barred(self) -> set[str]:
        """Identities that are not to be asked."""
        return {name for name, count in self.strikes.items() if count >= self.max_failures}

    def observe(self, failed: Iterable[str], good: Iterable[str]) -> None:
        """Take in the outcome of a round."""
        for name in failed:
            self.strikes[name] = self.strikes.get(name, 0) + 1
            if self.strikes[name] == self.max_failures:
                log(
                    WARNING,
                    "%s failed %d times in a row and is not asked again until the next profiling",
                    name,
                    self.max_failures,
                )
        for name in good:
            self.strikes.pop(name, None)

    def judge_training(self, failed: Iterable[str], good: Iterable[str]) -> None:
        """Count the failures of a round's training."""
        self.observe(sorted(failed), sorted(good))
        self._judged = {*failed, *good}

    def judge_evaluation(self, failed: Iterable[str]) -> None:
        """Count failures of evaluation, but of nodes that were asked to train too."""
        self.observe(sorted(set(failed) - self._judged), good=[])

    def clear(self) -> None:
        """Give every node a fresh start."""
        self.strikes.clear()


class TiFL(Wrapper):
    """Group nodes into tiers by latency and let one tier train each round.

    Before the first round every node is profiled. Each round then costs the latency of one
    tier and not that of the slowest node of the fleet. Which tier it is, is drawn from fixed
    chances (static policies) or from chances that favour tiers with low accuracy (adaptive).

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
        Time-out of a profiling round in seconds. Who misses all of them drops out.
    profile_interval : int, optional
        Profile again every so many rounds; None: only once.
    start_policy : str or sequence of float
        Chances that the adaptive policy begins with.
    interval : int
        Rounds between two evaluations of all tiers (adaptive).
    trigger : {"not-improved", "always"}
        Change the chances only if the tier trained last has not improved (paper), or always.
    rule : {"rank", "deficit"} or callable
        How accuracies become chances, see :func:`~flwr_hetero.tifl.algorithm.change_probs`.
    exponent : float
        Pressure of that rule; 0 is uniform.
    evaluate_per_tier : int
        Nodes per tier in such an evaluation.
    accuracy_key : str, optional
        Metric of the evaluation replies that says how good the model is on the node. None: the
        first with "acc" in its name, else minus the first with "loss" in its name.
    credits : int, sequence of int, "equal", "geometric", "paced", "auto" or None
        How often each tier may be chosen, see
        :func:`~flwr_hetero.tifl.algorithm.start_credits`; None: without limit. "auto" is
        "paced" for the adaptive policy and None for static ones, whose chances say it all.
    on_exhausted : {"refill", "ignore", "stop"}
        When no tier with nodes has credits: fill them up, forget them, or end the run.
    on_small_tier : {"shrink", "borrow", "skip"}
        When fewer than |C| of the tier's nodes are there: train fewer, add nodes of the next
        faster tiers, or draw another tier.
    max_failures : int
        Rounds in a row that a node may fail before it leaves its tier until the next profiling;
        training that counts begins the row anew.
    wait_s : float
        How long to wait for nodes if there are none, in seconds; may be infinite.
    seed : int
        Of tier and node selection.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy would wait for nodes that it is
        not shown, or cannot work with a selection from outside.

    Notes
    -----
    Deviations from the paper: one credit per round (Algorithm 2 as printed takes two), one
    draw over the tiers that can be chosen (as printed it can loop for ever), tiers are
    evaluated on a sample and only in the rounds whose figures are compared, quantile tiers by
    default, a selected tier of which nobody answers gets its credit back. The paper leaves the
    credits open; "paced" gives a tier as many as its measured speed earns.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = TiFL(FedAdam(), clients_per_round=5, policy="fast1")
    >>> TiFL(policy="warp")
    Traceback (most recent call last):
    ...
    ValueError: policy must be one of ..., got 'warp': check the name.
    """

    name: ClassVar[str] = "tifl"
    decides = frozenset({"selection"})

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
        start_policy: str | Sequence[float] = "uniform",
        interval: int = 10,
        trigger: str = "not-improved",
        rule: Rule = "rank",
        exponent: float = 1.0,
        evaluate_per_tier: int = 5,
        accuracy_key: str | None = None,
        credits: int | Sequence[int] | str | None = "auto",
        on_exhausted: str = "refill",
        on_small_tier: str = "shrink",
        max_failures: int = 3,
        wait_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        check_count("clients_per_round", clients_per_round, 1, "pass the nodes of a round")
        check_count("evaluate_per_tier", evaluate_per_tier, 1, "5 is usual")
        check_count("max_failures", max_failures, 1, "3 is usual")
        check_count("seed", seed, 0, "any such number will do")
        if on_small_tier not in ("shrink", "borrow", "skip"):
            raise invalid("on_small_tier", on_small_tier, "be shrink, borrow or skip", "choose one")
        if not wait_s >= 0:
            raise invalid("wait_s", wait_s, "be at least 0", "pass seconds")
        if isinstance(credits, str) and credits == "auto":
            credits = "paced" if isinstance(policy, str) and policy == ADAPTIVE else None
        self.profiling = TieringSettings(
            1 if isinstance(policy, str) and policy == VANILLA else num_tiers,
            tiering,
            sync_rounds,
            warmup_rounds,
            t_max,
            profile_interval,
        )
        self.settings = ChooserSettings(
            policy=policy,
            num_tiers=self.profiling.num_tiers,
            start_policy=start_policy,
            interval=interval,
            trigger=trigger,
            rule=rule,
            exponent=exponent,
            credits=credits,
            on_exhausted=on_exhausted,
        )
        super().__init__(strategy)
        self._evaluates = open_selection(
            self, clients_per_round, evaluate=self.settings.is_adaptive, shrink=on_small_tier
        )
        self.clients_per_round = clients_per_round
        self.evaluate_per_tier, self.accuracy_key = evaluate_per_tier, accuracy_key
        self.on_small_tier, self.wait_s = on_small_tier, wait_s
        self.rng = np.random.default_rng(seed)
        self.table: TierTable | None = None
        self.chooser: TierChooser | None = None
        self.estimate = TimeEstimate()
        self.joiners = Joiners(self, t_max)
        self.probation = Probation(max_failures)
        self.selected: list[int] = []
        self.current_tier: int | None = None
        self._num_rounds: int | None = None
        self._last_profile = 0
        self._new_table = False

    # --- profiling ---------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Profile the fleet, unless a checkpoint brought its tiers back."""
        self._num_rounds = run.num_rounds
        self.session.arrays, self.session.config = run.arrays, run.train_config
        wanted = self.settings.num_tiers
        online = wait_for_nodes(run.grid, wanted, self.wait_s)
        if self.table is not None:
            self._resume(run.grid, online, self.table)
        elif len(online) < wanted:
            rule = f"be at most the number of nodes, {len(online)}"
            raise invalid("num_tiers", wanted, rule, "ask for fewer tiers or start more nodes")
        else:
            self._profile(run.grid, online, server_round=0)

    def _resume(self, grid: Grid, online: Set[int], table: TierTable) -> None:
        identify_nodes(self, grid, self.profiling.t_max)
        self.joiners.know(node for node in online if self.identity(node) in table.latency)
        if not any(self.session.registry.find(name) in online for name in table.tier):
            log(
                WARNING,
                "TiFL: none of the %d nodes with a tier was found again among %d online",
                len(table.tier),
                len(online),
            )

    def _profile(self, grid: Grid, online: Set[int], server_round: int) -> None:
        found = tier_fleet(self, grid, online, server_round, self.profiling)
        self._last_profile = server_round
        if found is None:
            t_max = self.profiling.t_max
            what = f"TiFL: no node answered the profiling within t_max={t_max:g} s"
            if self.table is None:
                raise RuntimeError(f"{what}: check the ClientApp's log, or raise t_max.")
            log(WARNING, "%s: the tiers stay as they are", what)
            return
        self._set_tiers(found.table)
        self.estimate.measure(found.rounds, found.tiering, self.clients_per_round)
        self.probation.clear()
        self.joiners.know(online)

    def _set_tiers(self, table: TierTable) -> None:
        old, latency = self.chooser, table.typical_latency()
        self.table, self._new_table = table, True
        self.chooser = TierChooser(self.settings, table.num_tiers, self._num_rounds, latency)
        if old is not None and len(old.probs) == table.num_tiers:
            self.chooser.take_over(old)

    # --- selection ---------------------------------------------------------------------

    def before_train(self, server_round: int, grid: Grid) -> Grid:
        """Profile if it is due, take in joiners, draw a tier and nodes of it."""
        online = wait_for_nodes(grid, 1, self.wait_s)
        if self.table is None or self.profiling.is_due(server_round - self._last_profile):
            self._profile(grid, online, server_round)
        else:
            self.joiners.attend(grid, online, server_round)
        self._draw(online)
        log(INFO, "TiFL: tier %s, %d nodes", self.current_tier, len(self.selected))
        return GridView(grid, self.selected)

    def _draw(self, online: Set[int]) -> None:
        table, chooser = self._ready()
        fleet = Fleet(online, self.session.registry, self.probation.barred)
        drawn = draw_nodes(
            table, chooser, fleet, self.clients_per_round, self.on_small_tier, self.rng
        )
        self.current_tier, self.selected = drawn.tier, drawn.nodes
        self.estimate.expect(drawn.chances)
        if drawn.exhausted and not drawn.nodes:
            self.session.stop_reason = "the credits of all tiers that have nodes are spent"

    # --- replies -----------------------------------------------------------------------

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Compare the time estimate with the round's training."""
        self.estimate.observe(self.session.last_exchange_s)
        return replies

    def on_train_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Count failures in a row; a tier of which no reply counts gets its credit back."""
        self.probation.judge_training(failed, good)
        if not good and self.current_tier is not None:
            self._ready()[1].refund(self.current_tier)

    def before_evaluate(self, server_round: int, grid: Grid) -> Grid:
        """Show a sample of every tier when accuracies are due, else the nodes just trained."""
        if self._tiers_due(server_round):
            table, _ = self._ready()
            fleet = Fleet(online_nodes(grid), self.session.registry, self.probation.barred)
            sample = sample_tiers(table, fleet, self.evaluate_per_tier, self.rng)
            return GridView(grid, sample)
        return GridView(grid, self.selected if self._evaluates else [])

    def on_evaluate_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn the tiers' accuracies when they are due."""
        if self._tiers_due(server_round):
            table, chooser = self._ready()
            named = [(self.identity(r.metadata.src_node_id), r) for r in replies]
            accuracy = accuracy_per_tier(named, table, self.accuracy_key, self.leaf)
            chooser.learn(accuracy, self.current_tier)
        return replies

    def on_evaluate_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Count failures of nodes that only evaluate."""
        if good:  # else it may be the app that cannot evaluate
            self.probation.judge_evaluation(failed)

    def _tiers_due(self, server_round: int) -> bool:
        return self.settings.is_adaptive and server_round % self.settings.interval == 0

    def _ready(self) -> tuple[TierTable, TierChooser]:
        if self.table is None or self.chooser is None:
            raise RuntimeError("TiFL has no tiers yet: configure_train makes them.")
        return self.table, self.chooser

    # --- reports -----------------------------------------------------------------------

    def on_finish(self, run: Run) -> None:
        """Log the time estimate against the actual time."""
        self.estimate.log_summary()

    def privacy_report(self) -> str:
        """Say what the selection does to privacy amplification by sampling.

        Returns
        -------
        str
            Rates and caveats, for static policies.

        Raises
        ------
        ValueError
            For the adaptive policy, which reads accuracies without noise.
        """
        if self.settings.is_adaptive:
            raise invalid(
                "policy",
                ADAPTIVE,
                "be static for a privacy report",
                "it reads per-tier accuracies without noise; choose a static policy",
            )
        table, chooser = self._ready()
        sizes = [len(members) for members in table.members]
        return privacy_report(sampling_rates(chooser.probs, sizes, self.clients_per_round))

    def round_info(self) -> dict[str, Any]:
        """Return tier, chances, credits, accuracies and estimate; new tiers in full."""
        table, chooser = self._ready()
        books = chooser.as_dict()
        info = {
            "tier": self.current_tier,
            "tier_probs": books["probs"],
            "credits": books["credits"],
            "tier_accuracy": books["accuracy"],
            **self.estimate.as_dict(),
        }
        if self._new_table:
            info |= table.as_dict()
            if self.session.devices:
                info["devices"] = self.session.devices
            self._new_table = False
        return info

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        log(
            INFO,
            "\t├──> TiFL: %d nodes a round, %d tiers, policy %s, credits %s",
            self.clients_per_round,
            self.settings.num_tiers,
            self.settings.policy,
            self.settings.credits,
        )
        super().summary()

    def state_dict(self) -> StateDict:
        """Return tiers, chances, credits, accuracies, failures and generator."""
        table, chooser = self._ready()
        return {
            "table": json.dumps(table.as_dict()),
            "chooser": json.dumps(chooser.as_dict()),
            "estimate": json.dumps(self.estimate.state()),
            "strikes": json.dumps(self.probation.strikes),
            "last_profile": self._last_profile,
            "rng": rng_to_str(self.rng),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes are found again by their identity."""
        self.table = TierTable.from_dict(json.loads(str(state["table"])))
        self.chooser = TierChooser.restored(self.settings, json.loads(str(state["chooser"])))
        self.estimate.load(json.loads(str(state["estimate"])))
        self.probation.strikes = json.loads(str(state["strikes"]))
        self._last_profile = int(state["last_profile"])
        self.rng = rng_from_str(str(state["rng"]))
