"""Local steps by speed: how fast each node is, and how many steps it gets (Alg. 1, l. 1)."""

import json
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from math import nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.biased_local_sgd.algorithm import (
    deadline_steps,
    fast_class,
    gamma_steps,
    normalised_scales,
    slice_steps,
)
from flwr_hetero.biased_local_sgd.node_speeds import Job, NodeSpeeds, divided
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import config_of, read_number
from flwr_hetero.server.aggregate import BUFFERS, with_update
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import STEPS, check_on_missing, check_unscaled
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state

NORMALISED = {"normalised": 1.0, "sqrt": 0.5}
"""Exponent of the normalisation by steps."""
WEIGHTINGS = (*NORMALISED, "examples", "steps")
BY_STEPS = {"sqrt": "by the root of", "examples": "by", "steps": "by about the square of"}
"""How a node's own data then count by its steps."""
STATE = ("step_s", "link_s", "usual_steps", "jobs")
"""Entries of a saved LocalSteps."""
TRAFFIC = 0.5
"""Largest share of transfers in a node's slice."""
MAX_RATIO = 4.0
"""Ratio of two nodes' steps above which the log says so."""


def assigned_steps(message: Message) -> int:
    """Return the steps that an instruction asks for."""
    return int(read_number(config_of(message), keys.NUM_STEPS, 0.0))


class LocalSteps(Wrapper):
    r"""Set each node's local steps by its speed.

    .. math:: \tau_i = \lfloor \gamma_i \tau_F \rfloor

    The number is ``num-steps`` in the node's own config. A node that reports ``num-steps`` in
    its metrics may have taken fewer; a report of more counts as the number assigned, and only
    what is reported counts.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    budget : {"two-class", "deadline", "slice"}
        ``two-class``, the paper's: tau_F or gamma tau_F. ``deadline``: what fits into
        ``deadline_s``, transfers included. ``slice``: the same, but a node whose transfers
        would take more than half of it gets longer; for :class:`FedBuff`.
    gamma : float or mapping of str to float, optional
        For two classes: tau_S / tau_F in (0, 1], or one per node identity. None: measured.
    deadline_s : float, optional
        Seconds of a round. None: what a quick node needs for ``fast_steps``, the second or the one
        that 10 % are quicker than, and at least half of what the quickest third needs.
    min_steps, max_steps : int
        Bounds of every node's steps; ``max_steps`` is ``fast_steps`` if left out, and twice
        that for slices.
    weighting : {"normalised", "sqrt", "examples", "steps"}
        What a node's update counts. ``normalised``: scaled to the mean number of steps, so that
        its data count as in FedAvg; a node's single step may so be many times as long, which
        asks for a lower learning rate. ``sqrt``, the default: scaled by the root of that, so
        that data count by the root of the steps. ``examples``: unscaled, so that they count
        about by the steps; ``steps``: models by steps, about by their square.
    on_missing : {"raise", "warn"}
        What to do if no node reports its steps.

    Raises
    ------
    ValueError
        If a setting is out of range, does not go with the kind of budget, or the wrapped
        strategy cannot weight by steps.
    MissingHelpError
        In the first round, if no node reports its steps.

    Notes
    -----
    A node that was never measured gets ``min_steps``: the first round of a new fleet is its
    profiling. A reply without ``num-steps`` counts least: with the fewest steps of the others,
    or the smallest scale. Less than a third of the nodes cannot move a measured gamma, or the
    default deadline by more than 2: a fast class that is smaller is none, give gamma there.

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
    contracts = (STEPS,)
    buffers: tuple[str, ...] = BUFFERS
    has_shared_data = False
    """Whether all nodes see the same data, so that their weights change no objective."""

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
        weighting: str = "sqrt",
        on_missing: str = "raise",
    ) -> None:
        self.fast_steps = check_count("fast_steps", fast_steps, 1)
        self.min_steps = check_count("min_steps", min_steps, 1)
        most = (2 if budget == "slice" else 1) * fast_steps if max_steps is None else max_steps
        self.max_steps = check_count("max_steps", most, self.min_steps, "that is min_steps")
        self.budget = check_choice("budget", budget, ("two-class", "deadline", "slice"))
        if gamma is not None:
            for ratio in gamma.values() if isinstance(gamma, Mapping) else [gamma]:
                check_number("gamma", ratio, "(0, 1]")
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, "(0, inf)")
        if budget != "two-class" and gamma is not None:
            raise invalid("gamma", gamma, f"be left out with budget={budget!r}")
        if budget == "two-class" and deadline_s is not None:
            raise invalid("deadline_s", deadline_s, "be left out with budget='two-class'")
        self.gamma, self.deadline_s = gamma, deadline_s
        self.weighting = check_choice("weighting", weighting, WEIGHTINGS)
        self.on_missing = check_on_missing(on_missing)
        super().__init__(strategy)
        if self.weighting == "steps":
            self._check_weights_by_steps()
        if self.weighting in NORMALISED:
            check_unscaled(self, "weighting", weighting)
        self.speeds = NodeSpeeds()
        self.usual_steps: dict[str, tuple[float, float]] = {}  # and weight, of every node seen
        self.correction = NORMALISED.get(weighting, 0.0)
        self._assigned: dict[str, int] = {}
        self._has_warned = self.weighting not in BY_STEPS

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node; shape (len(nodes),)."""
        bounds = self.min_steps, self.max_steps
        step_s = np.array([self.speeds.step_s.get(node, nan) for node in nodes])
        if self.budget in ("deadline", "slice"):
            link_s = np.array([self.speeds.link_s.get(node, nan) for node in nodes])
            limit_s = self.deadline_s or self.speeds.quick_round_s(self.fast_steps)
            if self.budget == "slice":
                return slice_steps(limit_s, step_s, link_s, TRAFFIC, *bounds)
            return deadline_steps(limit_s, step_s, link_s, *bounds)
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

    def _check_weights_by_steps(self) -> None:
        leaf = type(self.leaf).__name__
        hint = 'or pass weighting="examples"'
        if not isinstance(self.leaf, FedAvg):
            raise invalid("strategy", leaf, "derive from FedAvg to weight by steps", hint)
        if any(getattr(s, "accountant", None) for s in self.chain() if s is not self):
            rule = "be without a privacy accountant, which asks for equal weights"
            raise invalid("strategy", leaf, rule, hint)

    # --- instructions --------------------------------------------------------------------

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Write each node's steps into its own config."""
        self._say_what_is_optimised()
        node_ids = [message.metadata.dst_node_id for message in messages]
        steps = self.num_steps([self.identity(node_id) for node_id in node_ids])
        steps = np.maximum(steps, self.speeds.usual_passes())  # one for each local epoch
        for message, count in zip(messages, steps.tolist(), strict=True):
            config_of(message)[keys.NUM_STEPS] = count
        return messages

    def _say_what_is_optimised(self) -> None:
        """Log once that steps differ much and the objective is not FedAvg's."""
        if self._has_warned or self.has_shared_data or not self.speeds.step_s:
            return
        steps = self.num_steps(list(self.speeds.step_s))
        least, most = int(steps.min()), int(steps.max())
        self._has_warned = most > MAX_RATIO * least
        if self._has_warned:
            log(
                WARNING if self.weighting == "steps" else INFO,
                "%s: nodes take %d to %d steps (ratio %.3g), and with weighting=%r a node's data "
                "count %s its steps; weighting='normalised' keeps the objective of FedAvg "
                "(docs/objectives.md)",
                *(type(self).__name__, least, most, most / least, self.weighting),
                BY_STEPS[self.weighting],
            )

    # --- replies -------------------------------------------------------------------------

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Return why the reported steps are none, if any are reported."""
        (metrics,) = reply.content.metric_records.values()
        if (claim := metrics.get(keys.NUM_STEPS)) is None or self.steps_of(context, reply):
            return None
        return f"claims {claim!r} steps instead of 1 to {self._assigned_to(context, reply)}"

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Clamp the reported steps, learn the nodes' speeds and weigh the updates."""
        self._assigned = {}
        for reply in replies:
            (metrics,) = reply.content.metric_records.values()
            assigned, steps = self._assigned_to(context, reply), self.steps_of(context, reply)
            if (claim := read_number(metrics, keys.NUM_STEPS, 0.0)) > assigned:
                text = f"claims {claim:g} steps, was assigned {assigned}"
                context.note(reply.metadata.src_node_id, text)
            self._assigned[context.identity(reply.metadata.src_node_id)] = assigned
            if steps:
                metrics[keys.NUM_STEPS] = steps
                self._measure(context, reply, steps)
        return self._normalised(context, replies) if self.correction else replies

    def steps_of(self, context: Exchange, reply: Message) -> int:
        """Return the steps that count: those reported, at most those assigned; 0 for nonsense."""
        (metrics,) = reply.content.metric_records.values()
        return max(
            0,
            int(min(read_number(metrics, keys.NUM_STEPS, 0.0), self._assigned_to(context, reply))),
        )

    def _assigned_to(self, context: Exchange, reply: Message) -> int:
        return assigned_steps(context.instruction_of(reply))

    def counted_steps(self, context: Exchange, replies: Sequence[Message]) -> list[int]:
        """Return the steps of each reply; those that report none have the fewest of the others."""
        steps = [self.steps_of(context, reply) for reply in replies]
        fewest = min((count for count in steps if count), default=1)
        return [count or fewest for count in steps]

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Weight models by their steps (Alg. 1, l. 15, Eq. 4), if asked for."""
        if self.weighting != "steps":
            return super().weights(context, replies)
        return [float(count) for count in self.counted_steps(context, replies)]

    def _normalised(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Scale each update to the mean number of steps, so that no data count by their speed."""
        start, weights = context.arrays, self.top.weights(context, replies)
        if not any(weights):
            return replies
        steps = np.array([self.steps_of(context, reply) for reply in replies])
        steps[steps == 0] = steps.max(initial=1)  # not reported: the smallest scale
        scales = self._scales(replies, steps, weights).tolist()
        return [
            reply if scale == 1.0 else with_update(reply, start, start, scale, self.buffers)
            for reply, scale in zip(replies, scales, strict=True)
        ]

    def _scales(
        self, replies: list[Message], steps: NDArray[np.int64], weights: list[float]
    ) -> NDArray[np.float64]:
        """Return the scale of each update: mean steps of all nodes seen, over its own."""
        for reply, count, weight in zip(replies, steps.tolist(), weights, strict=True):
            self.usual_steps[self.identity(reply.metadata.src_node_id)] = (count, weight)
        known, weight_of = np.array(list(self.usual_steps.values())).T
        mean_steps = float(np.average(known, weights=weight_of))
        return normalised_scales(steps, mean_steps, self.correction)

    def on_profile_replies(self, context: Exchange, replies: list[Message]) -> None:
        """Learn from another wrapper's profiling how fast nodes are that report their steps."""
        for reply in replies:
            for metrics in reply.content.metric_records.values():
                steps = int(read_number(metrics, keys.NUM_STEPS, 0.0))
                if steps >= 1:
                    self._measure(context, reply, steps)

    def _measure(self, context: Exchange, reply: Message, steps: int) -> None:
        """Learn a node's job, and its times of a step and of a message."""
        self.speeds.note_job(identity := self.identity(reply.metadata.src_node_id), reply, steps)
        if (latency := context.latency_of(reply)) is not None:
            seen_s = context.round_trip_s.get(reply.metadata.reply_to_message_id, 0.0)
            times = divided(reply, latency, steps, seen_s if context.same_clock else 0.0)
            self.speeds.observe(identity, steps, *times)

    # --- the run -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the measured times belong to."""
        if self.speeds.step_s and not run.continues:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the steps assigned to each node and the measured gamma."""
        return {"num-steps": self._assigned, "gamma": self.speeds.classes()[1]}

    def state_dict(self) -> StateDict:
        """Return the measured times."""
        return {
            "step_s": json.dumps(self.speeds.step_s),
            "link_s": json.dumps(self.speeds.link_s),
            "usual_steps": json.dumps(self.usual_steps),
            "jobs": json.dumps(self.speeds.jobs),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, dict.fromkeys(STATE, str), "LocalSteps")
        self.speeds.step_s = json.loads(str(state["step_s"]))
        self.speeds.link_s = json.loads(str(state["link_s"]))
        self.usual_steps = json.loads(str(state["usual_steps"]))
        jobs = json.loads(str(state["jobs"]))
        self.speeds.jobs = {node: Job(*job) for node, job in jobs.items()}

    def summary(self) -> None:
        """Log the step budget and the wrapped strategy's settings."""
        steps = f"{self.min_steps} to {self.max_steps} steps, {self.budget}"
        log(INFO, "\t├──> %s: %s", type(self).__name__, steps)
        super().summary()
