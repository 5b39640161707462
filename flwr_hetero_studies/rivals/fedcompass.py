"""FedCompass: steps by speed, so that nodes which start at different times arrive together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.asynchronous.algorithm import Shares, staleness_weights
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.biased_local_sgd.strategy import assigned_steps
from flwr_hetero.errors import check_count
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.queue import on_clock
from flwr_hetero.records import config_of
from flwr_hetero.server.client_support import STEPS
from flwr_hetero_studies.rivals.node_memory import NodeMemory

SMOOTHING = 0.1
"""Weight of the past in a node's time per step."""
SLACK = 1.2
"""How long a group is waited for, as a multiple of its expected time."""


@dataclass(eq=False)
class ArrivalGroup:
    """Nodes that are to arrive together.

    They are expected at ``expected_s`` and waited for until ``latest_s``; ``step_s`` is the time
    per step of the quickest one.
    """

    expected_s: float = inf
    latest_s: float = inf
    step_s: float = inf
    in_flight: set[int] = field(default_factory=set)


def assign(
    now_s: float, step_s: float, groups: Iterable[ArrivalGroup], least: int, most: int
) -> tuple[int, ArrivalGroup]:
    """Return a node's steps, and the group that it joins or begins.

    A node joins the group for which it can take most steps, from ``least`` to ``most``. If there is
    none, it begins a group. This arrives, if possible, when the quickest node of another group
    could be back with ``most`` steps.

    >>> steps, group = assign(0.0, 2.0, [], 5, 20)
    >>> steps, group.expected_s, group.latest_s
    (20, 40.0, 48.0)
    >>> assign(10.0, 1.0, [group], 5, 20)[0], assign(10.0, 2.0, [group], 5, 20)[0]
    (20, 15)
    """
    fixed = [group for group in groups if group.latest_s < inf]
    steps = {floor((group.expected_s - now_s) / step_s + 1e-9): group for group in fixed}
    fit = [count for count in steps if least <= count <= most]
    if fit:
        return max(fit), steps[max(fit)]
    back_s = [g.latest_s + g.step_s * most for g in fixed if now_s < g.latest_s]
    counts = [floor((at_s - now_s) / step_s) for at_s in back_s]
    later = [count for count in counts if count <= most]
    count = max(least, *later) if later else most
    took_s = count * step_s
    return count, ArrivalGroup(now_s + took_s, on_clock(now_s + SLACK * took_s), step_s)


class FedCompass(NodeMemory, Rule):
    r"""Let nodes arrive in groups, each with the steps that fit until its group is expected.

    .. math:: w \leftarrow w + \sum_{i \in group} \frac{n_i}{\sum_k n_k}
              \frac{w_i - w_{start}}{\sqrt{1 + s_i}}

    Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices
    Using a Computing Power-Aware Scheduler", ICLR 2024.

    A node takes ``min_steps`` to ``max_steps``, and ``min_steps`` before it was measured. Its time
    per step includes its link. First replies are added one by one, and late ones with the next
    group. The sum over k has all nodes in flight, of which those that have not replied yet count
    as the mean of the others.
    """

    facts = "step_s", "weight"
    decides = Rule.decides | {"steps"}
    client_support = (STEPS,)
    # The paper has no limit.
    node_limit = None

    def __init__(
        self,
        strategy: Strategy | None = None,
        min_steps: int = 8,
        max_steps: int = 40,
        *,
        concurrency: int | None = None,
        seed: int = 0,
    ) -> None:
        self.min_steps = check_count("min_steps", min_steps, 1)
        self.max_steps = check_count("max_steps", max_steps, min_steps, "that is min_steps")
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        self.step_s: dict[str, float] = {}
        # The weight of each node's last update.
        self.weight: dict[str, float] = {}
        self._groups: list[ArrivalGroup] = []
        # The group of each message; None means that it was late.
        self._group_of: dict[str, ArrivalGroup | None] = {}
        self._num_nodes = 0

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        self._num_nodes = max(self._num_nodes, in_flight + len(idle))
        grouped = [u for u in waiting if self._group_of[u.pending.message_id] is not None]
        held = {update.pending.node_id for update in grouped}
        return super().next_nodes([node for node in idle if node not in held], in_flight, [])

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        now_s = context.fleet.clock.virtual_s
        step_s = {id(m): self.step_s.get(self.identity(m.metadata.dst_node_id)) for m in messages}
        for message in sorted(messages, key=lambda m: step_s[id(m)] or inf):
            steps = self.min_steps
            group = ArrivalGroup()
            own_s = step_s[id(message)]
            if own_s is not None:
                steps, group = assign(now_s, own_s, self._groups, self.min_steps, self.max_steps)
                group.step_s = min(group.step_s, own_s)
            if group not in self._groups:
                self._groups.append(group)
            group.in_flight.add(message.metadata.dst_node_id)
            config_of(message)[keys.NUM_STEPS] = steps
        return messages

    @property
    def wake_s(self) -> float:
        return min((group.latest_s for group in self._groups), default=inf)

    def failed(self, node_id: int) -> None:
        for group in self._groups:
            group.in_flight.discard(node_id)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the updates of a group that is complete or over, with those that are late."""
        ids = [update.pending.message_id for update in waiting]
        for message_id, update in zip(ids, waiting, strict=True):
            if message_id not in self._group_of:
                self._group_of[message_id] = self._arrive(update)
        for group in list(self._groups):
            if group.in_flight and self.fleet.clock.virtual_s < group.latest_s:
                continue
            self._groups.remove(group)
            groups = [self._group_of[message_id] for message_id in ids]
            if group in groups:
                due = [i for i, each in enumerate(groups) if each in (group, None)]
                for i in due:
                    del self._group_of[ids[i]]
                return [waiting[i] for i in due]
        return []

    def _arrive(self, update: Update) -> ArrivalGroup | None:
        """Learn a node's speed, and return its group if that still waits for it."""
        pending = update.pending
        steps = assigned_steps(pending.instruction)
        name = self.identity(pending.node_id)
        now_s = (update.arrived_s - pending.sent_s) / steps
        self.step_s[name] = max(now_s + SMOOTHING * (self.step_s.get(name, now_s) - now_s), 1e-9)
        group = next((group for group in self._groups if pending.node_id in group.in_flight), None)
        if group is not None:
            group.in_flight.remove(pending.node_id)
        return group

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weight each node's update by its share of the examples of all nodes in flight."""
        names = (self.identity(update.pending.node_id) for update in updates)
        self.weight |= dict(zip(names, weights, strict=True))
        in_flight = min(self.concurrency or inf, max(self._num_nodes, len(self.weight)))
        total = in_flight * sum(self.weight.values()) / len(self.weight)
        started = [update.pending.version for update in updates]
        discounts = staleness_weights(started, self.version)
        return Shares(discounts, sum(weights) / total if total else 1.0, np.ones(len(updates)))

    def round_info(self) -> dict[str, Any]:
        pending = [update.pending for update in self.updates.values()]
        steps = {self.identity(p.node_id): assigned_steps(p.instruction) for p in pending}
        return super().round_info() | {"num_steps": steps}
