"""What is known of each node's speed: smoothed step and link times, and the classes they make."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, ClassVar, TypedDict, TypeGuard, Unpack

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.biased_local_sgd.algorithm import (
    check_bounds,
    class_gamma,
    deadline_steps,
    fast_class,
    gamma_steps,
    smooth_step_time,
)
from flwr_hetero.errors import invalid
from flwr_hetero.records import config_of
from flwr_hetero.server.exchange import Latency
from flwr_hetero.server.nodes import is_simulated
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict

SHORTEST_STEP_S = 1e-9
"""So that a report of 0 s is a time and not a division by zero."""


class Speeds:
    """Smoothed seconds per step and per transfer of every node seen so far."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.step_s: dict[str, float] = {}
        self.link_s: dict[str, float] = {}

    def observe(self, node: str, steps: int, compute_s: float, link_s: float) -> None:
        """Take in what a node needed in a round."""
        one_s = max(compute_s / steps, SHORTEST_STEP_S)
        for table, value_s in ((self.step_s, one_s), (self.link_s, link_s)):
            before_s = table.get(node, math.nan)
            table[node] = smooth_step_time(before_s, value_s, self.smoothing)

    def step_times_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return seconds per step, NaN where unknown; shape (len(nodes),)."""
        return np.array([self.step_s.get(node, math.nan) for node in nodes], dtype=np.float64)

    def link_times_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return seconds on the link, NaN where unknown; shape (len(nodes),)."""
        return np.array([self.link_s.get(node, math.nan) for node in nodes], dtype=np.float64)

    def fast(self, nodes: Sequence[str]) -> NDArray[np.bool_]:
        """Tell which nodes are of the fast class of the whole fleet; shape (len(nodes),)."""
        known = list(self.step_s)
        classes = dict(zip(known, fast_class(self.step_times_s(known)), strict=True))
        return np.array([classes.get(node, False) for node in nodes], dtype=bool)

    def gamma(self) -> float:
        """Return the measured performance gap ratio of the two classes."""
        known = list(self.step_s)
        return class_gamma(self.step_times_s(known), self.fast(known))

    def shortest_round_s(self, fast_steps: int) -> float | None:
        """Return the time in which the quickest node takes ``fast_steps``, link included."""
        return min(
            (self.link_s[n] + fast_steps * self.step_s[n] for n in self.step_s), default=None
        )

    def state_dict(self) -> StateDict:
        """Return all figures as flat arrays."""
        nodes = list(self.step_s)
        return {
            "nodes": json.dumps(nodes),
            "step_s": self.step_times_s(nodes),
            "link_s": self.link_times_s(nodes),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        nodes = json.loads(str(state["nodes"]))
        for table, key in ((self.step_s, "step_s"), (self.link_s, "link_s")):
            table.clear()
            table.update(zip(nodes, np.asarray(state[key]).tolist(), strict=True))


def compute_and_link_s(
    reply: Message, latency: Latency, round_trip_s: float | None
) -> tuple[float, float]:
    """Divide a node's latency into computing and transfer."""
    if latency.source == "observed":
        return latency.seconds, 0.0
    if latency.emulated:
        link_s = float(reply.content.config_records[keys.TIMING][keys.TRANSFER_TIME])  # type: ignore[arg-type]
        return latency.seconds - link_s, link_s
    return latency.seconds, max(0.0, (round_trip_s or 0.0) - latency.seconds)


BUDGETS = ("two-class", "deadline")


class Budget(TypedDict, total=False):
    """Keyword arguments of :class:`StepPlan`, to be handed through."""

    budget: str
    gamma: float | Mapping[str, float] | None
    deadline_s: float | None
    min_steps: int
    max_steps: int | None


@dataclass(frozen=True)
class StepPlan:
    r"""The settings of :math:`\tau_i = \gamma_i \tau_F`."""

    fast_steps: int = 32
    budget: str = "two-class"
    gamma: float | Mapping[str, float] | None = None
    deadline_s: float | None = None
    min_steps: int = 1
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self.fast_steps, self.min_steps, self.max_steps)
        if self.budget not in BUDGETS:
            raise invalid("budget", self.budget, f"be one of {BUDGETS}", "choose one")
        self._check_deadline()
        for value in self._given_gammas():
            if not isinstance(value, (int, float, np.number)) or not 0 < value <= 1:
                raise invalid("gamma", value, "lie in (0, 1]", "it is fast time over slow time")

    def _check_deadline(self) -> None:
        by_deadline = self.budget == "deadline"
        if self.gamma is not None and by_deadline:
            raise invalid("gamma", self.gamma, "be left out with a deadline", "it is in seconds")
        if self.deadline_s is not None and not (by_deadline and 0 < self.deadline_s < math.inf):
            rule = "be positive, finite and with budget='deadline'"
            raise invalid("deadline_s", self.deadline_s, rule, "pass seconds, or leave it out")

    def _given_gammas(self) -> list[float]:
        if isinstance(self.gamma, Mapping):
            return list(self.gamma.values())
        return [] if self.gamma is None else [self.gamma]

    def steps_for(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.int64]:
        """Decide how many steps each node takes."""
        low, high = self.min_steps, self.max_steps or self.fast_steps
        if self.budget == "two-class":
            gammas = self._gammas(nodes, speeds)
            return gamma_steps(gammas, self.fast_steps, min_steps=low, max_steps=high)
        deadline_s = self.deadline_s or speeds.shortest_round_s(self.fast_steps)
        if deadline_s is None:
            return np.full(len(nodes), low, np.int64)
        step_s, link_s = speeds.step_times_s(nodes), speeds.link_times_s(nodes)
        return deadline_steps(deadline_s, step_s, link_s, min_steps=low, max_steps=high)

    def _gammas(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.float64]:
        if isinstance(self.gamma, Mapping):
            return np.array([self.gamma.get(node, math.nan) for node in nodes], np.float64)
        if self.gamma == 1:
            return np.ones(len(nodes))
        slow = speeds.gamma() if self.gamma is None else self.gamma
        gammas = np.where(speeds.fast(nodes), 1.0, slow)
        gammas[np.isnan(speeds.step_times_s(nodes))] = math.nan
        return gammas

    def fast_nodes(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.bool_]:
        """Tell which nodes are of the fast class."""
        if not isinstance(self.gamma, Mapping):
            return speeds.fast(nodes)
        known = list(self.gamma)
        classes = fast_class([1 / self.gamma[node] for node in known])
        fast = {node for node, is_fast in zip(known, classes, strict=True) if is_fast}
        return np.array([node in fast for node in nodes], dtype=bool)


class LocalSteps(Wrapper):
    r"""Tell each node how many local steps to take: :math:`\tau_i = \gamma_i \tau_F`.

    The number is ``num-steps`` in the node's own config. A node that reports ``num-steps`` in
    its metrics may have taken fewer; a claim of more is cut down to what it was given.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    smoothing : float
        Weight of the past in a node's measured times, in [0, 1).
    **budget
        ``budget``, ``gamma``, ``deadline_s``, ``min_steps``, ``max_steps``: as for
        :class:`~flwr_hetero.biased_local_sgd.step_budget.StepPlan`.

    Raises
    ------
    ValueError
        If a setting is out of range or does not go with the kind of budget.

    Notes
    -----
    A node that was never measured gets ``min_steps``: the first round of a fresh fleet is its
    profiling. A measured gamma trusts the fastest report; where nodes may lie about their time
    give gamma, or use a deadline, by which a lie concerns the liar only.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", section 4.1.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = LocalSteps(FedAdam(), fast_steps=32, budget="deadline", deadline_s=60.0)
    >>> LocalSteps(gamma=0.0)
    Traceback (most recent call last):
    ...
    ValueError: gamma must lie in (0, 1], got 0.0: ...
    """

    name: ClassVar[str] = "local-steps"
    decides = frozenset({"steps"})

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        smoothing: float = 0.5,
        **budget: Unpack[Budget],
    ) -> None:
        if not 0 <= smoothing < 1:
            raise invalid("smoothing", smoothing, "lie in [0, 1)", "0 keeps only the newest time")
        self.plan = StepPlan(fast_steps, **budget)
        super().__init__(strategy)
        self.speeds = Speeds(smoothing)
        self.assigned: dict[int, int] = {}
        self._simulated = False

    # --- instructions --------------------------------------------------------------------

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Write each node's steps into its own config."""
        self._simulated = is_simulated(grid)
        node_ids = [message.metadata.dst_node_id for message in messages]
        nodes = [self.identity(node_id) for node_id in node_ids]
        steps = self.plan.steps_for(nodes, self.speeds).tolist()
        self.assigned = dict(zip(node_ids, steps, strict=True))
        for message in messages:
            config_of(message)[keys.NUM_STEPS] = self.assigned[message.metadata.dst_node_id]
        return messages

    # --- replies -------------------------------------------------------------------------

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Check the steps that nodes claim, and learn how fast they are."""
        good = []
        for reply in replies:
            node_id = reply.metadata.src_node_id
            steps = self._accept(node_id, reply)
            if steps:
                (metrics,) = reply.content.metric_records.values()
                metrics[keys.NUM_STEPS] = steps
                self._measure(node_id, reply, steps)
                good.append(reply)
        return good

    def on_profile_replies(self, replies: list[Message]) -> None:
        """Learn from another wrapper's profiling how fast nodes are that say their steps."""
        for reply in replies:
            claims = [m.get(keys.NUM_STEPS) for m in reply.content.metric_records.values()]
            if len(claims) == 1 and _is_count(claims[0]):
                self._measure(reply.metadata.src_node_id, reply, int(claims[0]))

    def steps_of(self, reply: Message) -> int:
        """Return the steps that count for a reply: those it claims, at most those given."""
        (metrics,) = reply.content.metric_records.values()
        assigned = self.assigned[reply.metadata.src_node_id]
        claim = metrics.get(keys.NUM_STEPS, assigned)
        return min(int(claim), assigned) if _is_count(claim) else 0

    def _accept(self, node_id: int, reply: Message) -> int:
        """Return the steps to count for a reply; 0 if it must be dropped."""
        (metrics,) = reply.content.metric_records.values()
        assigned, steps = self.assigned[node_id], self.steps_of(reply)
        claim = metrics.get(keys.NUM_STEPS, assigned)
        if not steps:
            self.session.fail(node_id, f"claims {claim!r} steps instead of 1 to {assigned}")
        elif isinstance(claim, (int, float)) and claim > assigned:
            self.session.note(node_id, f"claims {claim:g} steps, was given {assigned}")
        return steps

    def _measure(self, node_id: int, reply: Message, steps: int) -> None:
        latency = self.session.latency.get(node_id)
        if latency is None:
            return
        message_id = reply.metadata.reply_to_message_id
        seen_s = None if self._simulated else self.session.round_trip_s.get(message_id)
        compute_s, link_s = compute_and_link_s(reply, latency, seen_s)
        self.speeds.observe(self.identity(node_id), steps, compute_s, link_s)

    # --- the run -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the measured times belong to."""
        if self.speeds.step_s:
            self.session.arrays, self.session.config = run.arrays, run.train_config
            identify_nodes(self, run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the steps given to each node and the measured gamma."""
        in_order = sorted(self.assigned, key=self.session.registry.sort_key)
        steps = {self.identity(node_id): self.assigned[node_id] for node_id in in_order}
        return {"num-steps": steps, "gamma": self.speeds.gamma()}

    def state_dict(self) -> StateDict:
        """Return the measured times."""
        return self.speeds.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.speeds.load_state_dict(state)

    def summary(self) -> None:
        """Log the step plan and the wrapped strategy's settings."""
        log(INFO, "\t├──> %s: %s", type(self).__name__, self.plan)
        super().summary()


def _is_count(claim: object) -> TypeGuard[int | float]:
    return isinstance(claim, (int, float)) and math.isfinite(claim) and claim >= 1
