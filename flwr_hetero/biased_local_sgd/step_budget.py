"""Local steps by speed: how fast each node is, and how many steps it gets (Alg. 1, l. 1)."""

import json
from collections.abc import Mapping, Sequence
from logging import INFO
from math import inf, nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.biased_local_sgd.algorithm import (
    class_gamma,
    deadline_steps,
    fast_class,
    gamma_steps,
)
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import config_of, read_number
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state

LONGEST_S = 1e9
"""Times are kept within 1/LONGEST_S and LONGEST_S: a node may report anything."""


class NodeSpeeds:
    """Smoothed seconds per step and per transfer of every node measured so far."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.step_s: dict[str, float] = {}
        self.link_s: dict[str, float] = {}

    def observe(self, node: str, steps: int, compute_s: float, link_s: float) -> None:
        """Update a node's times with those of a round."""
        step_s = min(max(compute_s / steps, 1 / LONGEST_S), LONGEST_S)
        for times, time_s in ((self.step_s, step_s), (self.link_s, min(link_s, LONGEST_S))):
            if node in times:
                time_s = self.smoothing * times[node] + (1 - self.smoothing) * time_s
            times[node] = time_s

    def classes(self) -> tuple[set[str], float]:
        """Return the fast nodes, and gamma between the two classes."""
        step_s = list(self.step_s.values())
        fast = fast_class(step_s)
        names = {node for node, is_fast in zip(self.step_s, fast, strict=True) if is_fast}
        return names, class_gamma(step_s, fast)

    def shortest_round_s(self, num_steps: int) -> float:
        """Return the seconds that the quickest node needs, link included."""
        return min((self.link_s[n] + num_steps * self.step_s[n] for n in self.step_s), default=inf)


class LocalSteps(Wrapper):
    r"""Set each node's local steps by its speed.

    .. math:: \tau_i = \lfloor \gamma_i \tau_F \rfloor

    The number is ``num-steps`` in the node's own config. A node that reports ``num-steps`` in
    its metrics may have taken fewer; a report of more counts as the number assigned.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    budget : {"two-class", "deadline"}
        ``two-class``, the paper's: tau_F or gamma tau_F. ``deadline``: what fits into
        ``deadline_s``, transfers included.
    gamma : float or mapping of str to float, optional
        For two classes: tau_S / tau_F in (0, 1], or one per node identity. None: measured.
    deadline_s : float, optional
        Seconds of a round. None: what the quickest node needs for ``fast_steps``.
    min_steps, max_steps : int
        Bounds of every node's steps; ``max_steps`` is ``fast_steps`` if left out.
    smoothing : float
        Weight of the past in a node's measured times, in [0, 1).

    Raises
    ------
    ValueError
        If a setting is out of range or does not go with the kind of budget.

    Notes
    -----
    A node that was never measured gets ``min_steps``: the first round of a new fleet is its
    profiling. A measured gamma trusts the fastest report; where nodes may lie about their time
    give gamma, or use a deadline, by which a lie concerns the liar only.

    References
    ----------
    Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems",
    section 4.1.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = LocalSteps(FedAdam(), fast_steps=32, budget="deadline", deadline_s=60.0)
    """

    name: ClassVar[str] = "local-steps"
    decides = frozenset({"steps"})

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        budget: str = "two-class",
        gamma: float | Mapping[str, float] | None = None,
        deadline_s: float | None = None,
        min_steps: int = 1,
        max_steps: int | None = None,
        smoothing: float = 0.5,
    ) -> None:
        self.fast_steps = check_count("fast_steps", fast_steps, 1)
        self.min_steps = check_count("min_steps", min_steps, 1)
        most = fast_steps if max_steps is None else max_steps
        self.max_steps = check_count("max_steps", most, self.min_steps, "that is min_steps")
        self.budget = check_choice("budget", budget, ("two-class", "deadline"))
        if gamma is not None:
            for ratio in gamma.values() if isinstance(gamma, Mapping) else [gamma]:
                check_number("gamma", ratio, "(0, 1]")
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, "(0, inf)")
        if budget == "deadline" and gamma is not None:
            raise invalid("gamma", gamma, "be left out with budget='deadline'")
        if budget != "deadline" and deadline_s is not None:
            raise invalid("deadline_s", deadline_s, "be left out without budget='deadline'")
        self.gamma, self.deadline_s = gamma, deadline_s
        super().__init__(strategy)
        self.speeds = NodeSpeeds(check_number("smoothing", smoothing, "[0, 1)"))
        self.assigned: dict[int, int] = {}

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node; shape (len(nodes),)."""
        bounds = self.min_steps, self.max_steps
        step_s = np.array([self.speeds.step_s.get(node, nan) for node in nodes])
        if self.budget == "deadline":
            link_s = np.array([self.speeds.link_s.get(node, nan) for node in nodes])
            deadline_s = self.deadline_s or self.speeds.shortest_round_s(self.fast_steps)
            return deadline_steps(deadline_s, step_s, link_s, *bounds)
        if isinstance(self.gamma, Mapping):
            gammas = np.array([self.gamma.get(node, nan) for node in nodes])
        elif self.gamma == 1:  # balanced: no time is needed
            gammas = np.ones(len(nodes))
        else:
            fast, measured = self.speeds.classes()
            slow_gamma = measured if self.gamma is None else self.gamma
            gammas = np.array([1.0 if node in fast else slow_gamma for node in nodes])
            gammas[np.isnan(step_s)] = nan
        return gamma_steps(gammas, self.fast_steps, *bounds)

    def fast_nodes(self) -> set[str]:
        """Return the nodes of the fast class: by ``gamma`` of each node, else by measured times."""
        if not isinstance(self.gamma, Mapping):
            return self.speeds.classes()[0]
        fast = fast_class([1 / gamma for gamma in self.gamma.values()])
        return {node for node, is_fast in zip(self.gamma, fast, strict=True) if is_fast}

    # --- instructions --------------------------------------------------------------------

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Write each node's steps into its own config."""
        node_ids = [message.metadata.dst_node_id for message in messages]
        steps = self.num_steps([self.identity(node_id) for node_id in node_ids])
        self.assigned = dict(zip(node_ids, steps.tolist(), strict=True))
        for message in messages:
            config_of(message)[keys.NUM_STEPS] = self.assigned[message.metadata.dst_node_id]
        return messages

    # --- replies -------------------------------------------------------------------------

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Check the reported steps and learn the nodes' speeds."""
        good = []
        for reply in replies:
            node_id, steps = reply.metadata.src_node_id, self.steps_of(reply)
            (metrics,) = reply.content.metric_records.values()
            claim, assigned = metrics.get(keys.NUM_STEPS), self.assigned[node_id]
            if not steps:
                self.session.fail(node_id, f"claims {claim!r} steps instead of 1 to {assigned}")
                continue
            if read_number(metrics, keys.NUM_STEPS, 0.0) > assigned:
                self.session.note(node_id, f"claims {claim:g} steps, was assigned {assigned}")
            metrics[keys.NUM_STEPS] = steps
            self._measure(reply, steps)
            good.append(reply)
        return good

    def steps_of(self, reply: Message) -> int:
        """Return the steps that count: those reported, at most those assigned; 0 for nonsense."""
        (metrics,) = reply.content.metric_records.values()
        assigned = self.assigned[reply.metadata.src_node_id]
        if keys.NUM_STEPS not in metrics:
            return assigned
        return max(0, int(min(read_number(metrics, keys.NUM_STEPS, 0.0), assigned)))

    def on_profile_replies(self, replies: list[Message]) -> None:
        """Learn from another wrapper's profiling how fast nodes are that report their steps."""
        for reply in replies:
            for metrics in reply.content.metric_records.values():
                steps = int(read_number(metrics, keys.NUM_STEPS, 0.0))
                if steps >= 1:
                    self._measure(reply, steps)

    def _measure(self, reply: Message, steps: int) -> None:
        """Divide a node's latency into computing and transfer."""
        node_id = reply.metadata.src_node_id
        latency = self.session.exchange.latency.get(node_id)
        if latency is None:
            return
        compute_s, link_s = latency.seconds, 0.0
        if latency.emulated:
            link_s = read_number(reply.content.config_records[keys.TIMING], keys.TRANSFER_TIME, 0.0)
            compute_s -= link_s
        elif latency.source == "reported" and not self.session.exchange.simulated:
            seen_s = self.session.exchange.round_trip_s.get(reply.metadata.reply_to_message_id, 0.0)
            link_s = max(0.0, seen_s - compute_s)
        self.speeds.observe(self.identity(node_id), steps, compute_s, link_s)

    # --- the run -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the measured times belong to."""
        if self.speeds.step_s:
            identify_nodes(self, run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the steps assigned to each node and the measured gamma."""
        in_order = sorted(self.assigned, key=self.session.registry.sort_key)
        steps = {self.identity(node_id): self.assigned[node_id] for node_id in in_order}
        return {"num-steps": steps, "gamma": self.speeds.classes()[1]}

    def state_dict(self) -> StateDict:
        """Return the measured times."""
        return {
            "step_s": json.dumps(self.speeds.step_s),
            "link_s": json.dumps(self.speeds.link_s),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"step_s": str, "link_s": str}, "LocalSteps")
        self.speeds.step_s = json.loads(str(state["step_s"]))
        self.speeds.link_s = json.loads(str(state["link_s"]))

    def summary(self) -> None:
        """Log the step budget and the wrapped strategy's settings."""
        steps = f"{self.min_steps} to {self.max_steps} steps, {self.budget}"
        log(INFO, "\t├──> %s: %s", type(self).__name__, steps)
        super().summary()
