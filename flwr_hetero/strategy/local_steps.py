"""Unbalanced local SGD: every node gets as many steps as it can take while the others do."""

import math
from logging import INFO, WARNING
from typing import Any, ClassVar, TypeGuard, Unpack

from flwr.app import ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.core.errors import invalid
from flwr_hetero.strategy.grid_view import is_simulated
from flwr_hetero.strategy.profiling import call_the_roll
from flwr_hetero.strategy.rounds import Run
from flwr_hetero.strategy.session import Failure
from flwr_hetero.strategy.speeds import Speeds, compute_and_link_s
from flwr_hetero.strategy.step_plan import Budget, StepPlan
from flwr_hetero.strategy.wrapper import StateDict, Wrapper


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
        :class:`~flwr_hetero.strategy.step_plan.StepPlan`.

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

    def _accept(self, node_id: int, reply: Message) -> int:
        """Return the steps to count for a reply; 0 if it must be dropped."""
        (metrics,) = reply.content.metric_records.values()
        assigned = self.assigned[node_id]
        claim = metrics.get(keys.NUM_STEPS, assigned)
        if not _is_count(claim):
            self.session.fail(node_id, f"claims {claim!r} steps instead of 1 to {assigned}")
            return 0
        if claim > assigned:
            node, reason = self.identity(node_id), f"claims {claim:g} steps, was given {assigned}"
            log(WARNING, "%s: %s, which is what counts", node, reason)
            self.session.failures.append(Failure(node, reason))
        return min(int(claim), assigned)

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
            call_the_roll(self, run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the steps given to each node and the measured gamma."""
        in_order = sorted(self.assigned, key=self.session.roster.sort_key)
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


def config_of(message: Message) -> ConfigRecord:
    """Return the first ConfigRecord of an instruction; one is made where there is none.

    Parameters
    ----------
    message : Message
        With records of its own.

    Returns
    -------
    ConfigRecord
        The live record.
    """
    for record in message.content.config_records.values():
        return record
    message.content["config"] = ConfigRecord()
    return message.content.config_records["config"]
