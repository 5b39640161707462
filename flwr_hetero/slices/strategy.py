"""FedSlice, the composition that is recommended."""

from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.node_speeds import MeasuredSteps
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import arrays_in, config_of, metrics_in, read_number
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.composition import check_enough_updates, name_of
from flwr_hetero.server.context import Exchange, Messages
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import (
    TOWARDS,
    buffer_size,
    draw_chances,
    largest_step,
    new_part,
    slice_steps,
)
from flwr_hetero.slices.average import ModelAverage
from flwr_hetero.state_dict import StateDict

ADAPTIVE = (FedAdagrad, FedAdam, FedYogi)
"""Server optimisers of which the length of a step does not depend on that of the updates."""

QUARTER = ", a server update has a quarter of these; FedBuff(buffer_size={}) needs fewer nodes"
"""Why a strategy that distrusts some gets too few updates, and what is the way out."""


class FedSlice(Wrapper):
    r"""Train in slices of time instead of rounds, and return the average of recent models.

    Each node takes the steps that fit a slice, in which a fast node takes ``slice_steps``. The
    server updates the model whenever a quarter of the nodes in flight have replied. A round ends
    when they have trained on as many examples as in a round of FedAvg, and has one evaluation.
    ValueError for a setting out of range, or a strategy that selects nodes, sets steps or trains
    trees; MissingClientSupportError in the first round, if no node takes the steps it is asked for.

    >>> strategy = FedSlice(concurrency=5)

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates, as for :class:`FedBuff`; FedAvg if left out.
    concurrency : int, optional
        Nodes in flight. None: all that are online.
    slice_steps : int
        Least steps that a fast node takes in a slice. Where a message has a fixed cost, a slice
        takes at least four times as long, but never longer than the node's job in FedAvg.
    rate_correction : float
        Power in [0, 1] with which a node's reporting rate is undone. 1: to reply more often buys no
        influence. 0: a node that replies twice as often counts twice as much.
    step_correction : float
        Power in [0, 1] with which the number of a node's steps is undone. 0: a node counts by its
        examples times its steps in a slice. 1: by its examples, as in FedAvg.
    window : int
        Largest number of models in the average that is evaluated and returned. After t server
        updates it is of about the last sqrt(2t).
    keep_optimizer : bool
        Nodes' torch optimizers continue from slice to slice: no momentum is lost. Each node keeps a
        state as large as the model, or twice that for Adam; a simulation keeps those of all.
    seed : int
        Of the draw of nodes.

    Notes
    -----
    All updates in flight move the model no further than a slice of a fast node would, so that
    FedAvg's learning rate fits. The momentum of ``FedAvgM`` repeats updates, which are smaller for
    it. A weighted update longer than five medians of all is cut to that, unless ``update_limit`` is
    None. The ``eta`` of ``FedAdam`` is divided among the nodes in flight. Nodes of which a slice
    takes longer are drawn as much less often, so that all have the same share of the places in
    flight. A node that has evaluated for a tenth of the time is left out but for the last time.
    ``start`` with the arrays that the last one returned, on the same grid, goes on with what is in
    flight.
    """

    name: ClassVar[str] = "fedslice"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        slice_steps: int = 10,
        rate_correction: float = 1.0,
        step_correction: float = 0.0,
        window: int = 32,
        keep_optimizer: bool = True,
        seed: int = 0,
    ) -> None:
        check_count("slice_steps", slice_steps, 1)
        check_choice("keep_optimizer", keep_optimizer, (True, False))
        # said before its parts say how they may go
        for inner in strategy.wrappers() if isinstance(strategy, Wrapper) else ():
            if both := inner.decides & DECIDED:
                rule = f"leave {' and '.join(sorted(both))} to FedSlice"
                raise invalid("strategy", name_of(inner), rule, "use one of the two")
        self.steps = SliceSteps(strategy, step_correction)
        self.steps.slice_steps, self.steps.keep_optimizer = slice_steps, keep_optimizer
        self.rule = SliceRule(self.steps, concurrency, rate_correction, seed)
        average = RecentAverage(self.rule, window=window)
        self.parts, self.decides = (average, self.rule, self.steps), DECIDED
        super().__init__(average)
        check_number("server_momentum", server_momentum(self), "[0, 1)")
        if concurrency is not None:
            check_enough_updates(self.leaf, concurrency, "concurrency", buffer_size, QUARTER)

    @property
    def node_limit(self) -> float | None:
        """Largest share of a node in all updates, in even shares; None: any."""
        return self.rule.node_limit

    @node_limit.setter
    def node_limit(self, limit: float | None) -> None:
        self.rule.node_limit = limit

    def round_info(self) -> dict[str, Any]:
        """Return the round's server updates, and examples trained on of those wanted."""
        return self.rule.round_facts


def server_momentum(strategy: Wrapper) -> float:
    """Return how much of the last server update FedAvgM repeats in the next one."""
    momentum: float = getattr(strategy.leaf, "server_momentum", 0.0)
    return momentum


class SliceSteps(MeasuredSteps):
    """Steps that fit a slice, whatever a message costs."""

    name: ClassVar[str] = "local_steps"
    called = "FedSlice"
    slice_steps: int
    keep_optimizer: bool

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node's next slice; shape (len(nodes),)."""
        speeds = self.speeds
        # l. 1
        return slice_steps(
            speeds.quick_round_s(self.slice_steps, with_link=False),
            [speeds.step_s.get(node, nan) for node in nodes],
            [speeds.fixed_s(node) for node in nodes],
            [speeds.jobs[node].steps if node in speeds.jobs else inf for node in nodes],
        )

    def slices_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return the seconds of each node's slice with its message; NaN where unknown."""
        steps_s = [self.speeds.step_s.get(node, nan) for node in nodes]
        fixed_s = np.nan_to_num([self.speeds.fixed_s(node) for node in nodes])
        return np.asarray(self.num_steps(nodes) * steps_s + fixed_s)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Ask nodes for the steps of a slice, and to go on with their optimizers."""
        for message in super().on_instructions(context, messages, grid):
            config_of(message)[keys.KEEP_OPTIMIZER] = self.keep_optimizer
        return messages


class SliceRule(FedBuff):
    """FedBuff with a buffer of its own size, a bound on the step, and rounds of equal work."""

    called = "FedSlice"
    unit, evaluates_each_round = "round", True
    # its buffers are small, and nodes of equal pace reply unevenly
    node_limit: float | None = 2.0

    def __init__(
        self, strategy: SliceSteps, concurrency: int | None, rate_correction: float, seed: int
    ) -> None:
        how: dict[str, Any] = {"weighting": "examples", "rate_correction": rate_correction}
        super().__init__(strategy, concurrency=concurrency, seed=seed, **how)
        self.steps, self._training = strategy, 1
        # examples trained on and server updates, of this round
        self.examples, self.count = 0.0, 0
        self.round_facts: dict[str, Any] = {}

    def draw(self, idle: list[int], room: int) -> list[int]:
        """Draw nodes; where there are more than places, long slices seldom get one."""
        if 0 < room < len(idle):
            each, every = [self.identity(node) for node in idle], list(self.steps.speeds.step_s)
            chances = draw_chances(self.steps.slices_s(each), self.steps.slices_s(every))
            # l. 0: whose turn does not count is left out, if enough others are idle
            turns = (chances / self.rng.random(len(idle))).tolist()
            least = min(1.0, sorted(turns)[-room])
            idle = [node for node, turn in zip(idle, turns, strict=True) if turn >= least]
        return super().draw(idle, room)

    def default_size(self, in_flight: int) -> int:
        """Return the number of updates of a server update."""
        self._training = in_flight
        # l. 3
        return buffer_size(in_flight)

    def check_nodes(self, nodes: int) -> None:
        """Refuse too few nodes for a strategy that distrusts some."""
        check_enough_updates(self.leaf, nodes, "the number of nodes", buffer_size, QUARTER)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh as FedBuff does, and bound how far the model moves."""
        # the fleet forgets those of most nodes
        self.rates.lengths |= {node: norm for node, (norm, *_) in self.fleet.norms.items()}
        shares, speeds = super().weigh(updates, weights), self.steps.speeds
        in_flight = max(len(updates), self._training)
        steps = self.steps.num_steps(list(speeds.step_s))
        limit = largest_step(steps, len(updates), in_flight, server_momentum(self))
        # l. 4: b, so that all updates in flight move the model by one slice
        bound = min(1.0, limit / self.rates.mean_discount())
        return shares._replace(scales=shares.scales * bound)

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model, which it did not start from."""
        start = next(iter(arrays_in(update.pending.instruction.content).values()))
        return with_update(reply, start, context.arrays, scale)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; a step that does not grow with the updates is divided among them."""
        leaf: Any = self.leaf
        if not isinstance(leaf, ADAPTIVE):
            return super().aggregate_train(server_round, replies, context)
        eta = leaf.eta
        # l. 4: as in FedAvg one whole step for all nodes in flight
        leaf.eta = eta * min(1.0, len(self.updates) / self._training)
        try:
            return super().aggregate_train(server_round, replies, context)
        finally:
            leaf.eta = eta

    def ends_round(self) -> bool:
        """Return whether nodes have trained as much as in a round of FedAvg."""
        jobs = self.steps.speeds.jobs
        known = [job.examples for job in jobs.values() if job.examples > 0]
        wanted = self._training * (sum(known) / len(known) if known else 0.0)
        self.count += 1
        self.examples += sum(map(self._examples_of, self.updates.values()))
        # l. 6: a round is over; not before a job is known, or it might end before help is missed
        if not jobs or self.examples < wanted:
            return False
        facts = {"updates": self.count, "examples": self.examples, "examples_wanted": wanted}
        self.round_facts = facts
        self.examples, self.count = max(0.0, self.examples - wanted), 0
        return True

    def _examples_of(self, update: Update) -> float:
        """Return on how many examples a node trained; of its whole job if it does not say."""
        (metrics,) = metrics_in(update.reply.content).values()
        examples = max(0.0, read_number(metrics, self.steps.speeds.weight_key, 1.0))
        job = self.steps.speeds.jobs.get(self.identity(update.pending.node_id))
        steps = read_number(metrics, keys.NUM_STEPS, 0.0)
        if job is None or not steps or job.steps == inf:
            return examples
        return examples * job.passes * min(1.0, steps / job.steps)

    def state_dict(self) -> StateDict:
        """Return FedBuff's state, and what was trained on in this round."""
        return super().state_dict() | {"trained": self.examples}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.examples = float(str(state["trained"]))


class RecentAverage(ModelAverage):
    """The average of recent models, of few while there are few; nodes train half way to it."""

    called = "FedSlice"

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Send nodes a model between the newest one and the average."""
        # an optimizer at the server with a memory goes on by itself
        if not self.average or server_momentum(self) or isinstance(self.leaf, ADAPTIVE):
            return messages
        # l. 1: steps from there are added to the newest model
        between = self.between(context.arrays)
        for message in messages:
            (name,) = message.content.array_records
            message.content[name] = between
        return messages

    def between(self, newest: ArrayRecord) -> ArrayRecord:
        """Return the model between the newest one and the average."""
        found = {}
        for name, array in newest.items():
            new = array.numpy()
            if new.dtype.kind == "f":
                mixed = (1 - TOWARDS) * new + TOWARDS * self.average[name]
                new = np.asarray(mixed).astype(new.dtype)
            found[name] = Array(new)
        return ArrayRecord(found)

    def part(self) -> float:
        """Return the newest model's part in the average."""
        # l. 5: p_t
        return new_part(self.count, self.window)


DECIDED = SliceSteps.decides | SliceRule.decides | RecentAverage.decides
"""What FedSlice decides."""
