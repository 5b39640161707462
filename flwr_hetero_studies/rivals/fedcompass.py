"""FedCompass: steps by speed, so that nodes which start at different times arrive together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.asynchronous.algorithm import Weights
from flwr_hetero.asynchronous.mail import on_clock
from flwr_hetero.asynchronous.rule import Arrival
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.step_budget import assigned_steps
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.records import config_of
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import STEPS, check_on_missing
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.state_dict import StateDict, check_state

SMOOTHING = 0.1
"""Weight of the past in a node's time per step."""


@dataclass(eq=False)
class Group:
    """Nodes that are to arrive together: when, until when they are waited for, and who is due."""

    expected_s: float = inf
    latest_s: float = inf
    step_s: float = inf
    """Of its quickest node."""
    at_work: set[int] = field(default_factory=set)


def assign(
    now_s: float, step_s: float, groups: Iterable[Group], least: int, most: int, slack: float
) -> tuple[int, Group]:
    """Return a node's steps, and the group that it joins or that begins with it.

    It joins where it can take most steps, from ``least`` to ``most``. Else it begins a group that
    arrives when the quickest of another one could be back with ``most`` steps, if it can.

    >>> steps, group = assign(0.0, 2.0, [], 5, 20, slack=1.5)
    >>> steps, group.expected_s, group.latest_s
    (20, 40.0, 60.0)
    >>> assign(10.0, 1.0, [group], 5, 20, 1.5)[0], assign(10.0, 2.0, [group], 5, 20, 1.5)[0]
    (20, 15)
    """
    fixed = [group for group in groups if group.latest_s < inf]
    steps = {floor((group.expected_s - now_s) / step_s + 1e-9): group for group in fixed}
    if fit := [count for count in steps if least <= count <= most]:
        return max(fit), steps[max(fit)]
    back_s = [g.latest_s + g.step_s * most for g in fixed if now_s < g.latest_s]
    later = [count for at_s in back_s if (count := floor((at_s - now_s) / step_s)) <= most]
    count = max(least, *later) if later else most
    took_s = count * step_s
    return count, Group(now_s + took_s, on_clock(now_s + slack * took_s), step_s)


class FedCompass(FedBuff):
    r"""Let nodes arrive in groups, each with the steps that fit until its group is expected.

    .. math:: w \leftarrow w + \sum_{i \in group} \frac{n_i}{\sum_k n_k}
              \frac{w_i - w_{start}}{(1 + s_i)^{a}}

    Parameters
    ----------
    strategy : Strategy, optional
        What merges the updates; FedAvg if left out.
    min_steps, max_steps : int
        Bounds of every node's steps; a node that was never measured gets ``min_steps``.
    slack : float
        A group is waited for until its expected time times this, at least 1, from its begin.
    concurrency : int, optional
        Nodes that train at the same time, drawn uniformly from the idle ones; None: all online.
    staleness : {"sqrt", "none"} or float
        Exponent a: 1/2, 0, or a number.
    on_missing : {"raise", "warn"}
        What to do if no node reports its steps.
    seed : int
        Of the draw of nodes.

    Raises
    ------
    ValueError
        If a setting is out of range, or for the reasons of :class:`FedBuff`.
    MissingHelpError
        In the first merge, if no node reports its steps.

    Notes
    -----
    A node's time per step is that from instruction to reply over its steps, its link included.
    First replies are merged one by one. A reply that comes too late for its group is merged with
    the next group. The paper's share n_i is of all nodes, which all are at work: with a
    ``concurrency`` it is that of so many. Nodes that have not replied yet count as the mean of
    the others.

    References
    ----------
    Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices
    Using a Computing Power-Aware Scheduler", ICLR 2024.

    Examples
    --------
    >>> strategy = FedCompass(min_steps=8, max_steps=40)
    """

    decides = FedBuff.decides | {"steps"}
    contracts = (STEPS,)

    def __init__(
        self,
        strategy: Strategy | None = None,
        min_steps: int = 8,
        max_steps: int = 40,
        *,
        slack: float = 1.2,
        concurrency: int | None = None,
        staleness: str | float = "sqrt",
        on_missing: str = "raise",
        seed: int = 0,
    ) -> None:
        self.min_steps = check_count("min_steps", min_steps, 1)
        self.max_steps = check_count("max_steps", max_steps, min_steps, "that is min_steps")
        self.slack = check_number("slack", slack, "[1, inf)")
        self.on_missing = check_on_missing(on_missing)
        more: dict[str, Any] = {"concurrency": concurrency, "staleness": staleness, "seed": seed}
        super().__init__(strategy, weighting="examples", **more)
        self.step_s: dict[str, float] = {}
        self._groups: list[Group] = []
        self._group_of: dict[str, Group | None] = {}  # of a reply by message; None: it was late
        self._num_nodes = 0
        self._assigned: dict[str, int] = {}

    def next_nodes(self, idle: list[int], at_work: int, buffer: list[Arrival]) -> list[int]:
        """Start nodes whose group does not wait for others."""
        self._num_nodes = max(self._num_nodes, at_work + len(idle))
        waiting = {a.sent.node_id for a in buffer if self._group_of[_key(a)] is not None}
        return super().next_nodes([node for node in idle if node not in waiting], at_work, [])

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Assign groups and steps, quick nodes first."""
        now_s, bounds = self.fleet.clock.virtual_s, (self.min_steps, self.max_steps, self.slack)
        step_s = {id(m): self.step_s.get(self.identity(m.metadata.dst_node_id)) for m in messages}
        for message in sorted(messages, key=lambda m: step_s[id(m)] or inf):
            steps, group, own_s = self.min_steps, Group(), step_s[id(message)]
            if own_s is not None:
                steps, group = assign(now_s, own_s, self._groups, *bounds)
                group.step_s = min(group.step_s, own_s)
            if group not in self._groups:
                self._groups.append(group)
            group.at_work.add(message.metadata.dst_node_id)
            config_of(message)[keys.NUM_STEPS] = steps
        return super().on_instructions(context, messages, grid)

    @property
    def wake_s(self) -> float:  # type: ignore[override]
        """Wake up when a group is over."""
        return min((group.latest_s for group in self._groups), default=inf)

    def failed(self, node_id: int) -> None:
        """Wait no longer for a node."""
        for group in self._groups:
            group.at_work.discard(node_id)

    def due(self, buffer: list[Arrival], team: int) -> list[Arrival]:
        """Return the replies of a group that is complete or over, and those that came late."""
        for arrival in buffer:
            if _key(arrival) not in self._group_of:
                self._group_of[_key(arrival)] = self._arrive(arrival)
        for group in list(self._groups):
            if group.at_work and self.fleet.clock.virtual_s < group.latest_s:
                continue
            self._groups.remove(group)
            if any(self._group_of[_key(arrival)] is group for arrival in buffer):
                return [a for a in buffer if self._group_of[_key(a)] in (group, None)]
        return []

    def _arrive(self, arrival: Arrival) -> Group | None:
        """Learn a node's speed, and return the group that it was waited for in."""
        node_id, steps = arrival.sent.node_id, assigned_steps(arrival.sent.instruction)
        name, now_s = self.identity(node_id), (arrival.arrived_s - arrival.sent.sent_s) / steps
        self.step_s[name] = max(now_s + SMOOTHING * (self.step_s.get(name, now_s) - now_s), 1e-9)
        group = next((group for group in self._groups if node_id in group.at_work), None)
        if group is not None:
            group.at_work.remove(node_id)
        return group

    def merging(self, context: Exchange, arrivals: list[Arrival], version: int) -> None:
        """Forget the groups of what is merged."""
        super().merging(context, arrivals, version)
        self._assigned = {}
        for arrival in arrivals:
            del self._group_of[_key(arrival)]
            name = self.identity(arrival.sent.node_id)
            self._assigned[name] = assigned_steps(arrival.sent.instruction)

    def _weigh(self, context: Exchange, replies: list[Message], discounts: NDArray[Any]) -> Weights:
        """Let each node's update count by its share of the examples of all that are at work."""
        found = super()._weigh(context, replies, discounts)
        known = [usual.weight for usual in self.usual.values()]
        at_work = min(self.concurrency or inf, max(self._num_nodes, len(known)))
        total = at_work * sum(known) / len(known)
        return found._replace(step=float(found.weights.sum()) / total if total else 1.0)

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the measured times belong to."""
        if self.step_s:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the merge with the steps of each node."""
        return super().round_info() | {"num-steps": self._assigned}

    def state_dict(self) -> StateDict:
        """Return the nodes' times per step, and what FedBuff keeps."""
        return {**super().state_dict(), "step_s": json.dumps(self.step_s)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"step_s": str}, "FedCompass")
        super().load_state_dict(state)
        self.step_s = json.loads(str(state["step_s"]))


def _key(arrival: Arrival) -> str:
    return arrival.sent.instruction.metadata.message_id
