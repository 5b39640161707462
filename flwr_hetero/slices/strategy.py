"""FedSlice, the composition that is recommended, and the average of models."""

from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import trains_trees
from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.node_speeds import MeasuredSteps
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import config_of, metrics_in, read_number
from flwr_hetero.server.aggregate import keep_dtypes
from flwr_hetero.server.composition import check_enough_updates, name_of
from flwr_hetero.server.context import Exchange, Messages
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import buffer_size, largest_step, new_part, slice_steps
from flwr_hetero.state_dict import StateDict, entries_below

ARRAYS = "arrays/"


class FedSlice(Wrapper):
    r"""Train in slices of time instead of rounds, and return the average of recent models.

    Each node takes the steps that fit a slice, in which a quick node takes ``slice_steps``. The
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
        Nodes in flight, drawn uniformly from the idle ones. None: all that are online.
    slice_steps : int
        Least steps that a quick node takes in a slice. Where a message has a fixed cost, a slice
        takes at least four times as long, but never longer than the node's job in FedAvg.
    rate_correction : float
        Power in [0, 1] with which a node's reporting rate is undone. 0: a node that replies twice
        as often counts twice as much. 1: all count by their examples, as in FedAvg.
    step_correction : float
        Power in [0, 1] with which the number of a node's steps is undone, in the same sense.
    window : int
        Largest number of models in the average that is evaluated and returned. After t server
        updates it is of about the last sqrt(2t).
    keep_optimizer : bool
        Nodes' torch optimizers go on from slice to slice: no momentum is lost. Each node keeps a
        state as large as the model, or twice that for Adam; a simulation keeps those of all.
    seed : int
        Of the draw of nodes.

    Notes
    -----
    All updates in flight move the model no further than a slice of a quick node would, so that
    FedAvg's learning rate fits. The momentum of ``FedAvgM`` repeats updates, which are smaller for
    it. A node that has evaluated for a tenth of the time is left out but for the last time.
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
        rate_correction: float = 0.5,
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
            check_enough_updates(self.leaf, buffer_size(concurrency), "concurrency")

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
    node_limit = 2.0

    def __init__(
        self, strategy: SliceSteps, concurrency: int | None, rate_correction: float, seed: int
    ) -> None:
        how: dict[str, Any] = {"weighting": "examples", "rate_correction": rate_correction}
        super().__init__(strategy, concurrency=concurrency, seed=seed, **how)
        self.steps, self._training = strategy, 1
        # examples trained on and server updates, of this round
        self.examples, self.count = 0.0, 0
        self.round_facts: dict[str, Any] = {}

    def default_size(self, in_flight: int) -> int:
        """Return the number of updates of a server update."""
        self._training = in_flight
        # l. 3
        return buffer_size(in_flight)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh as FedBuff does, and bound how far the model moves."""
        shares, speeds = super().weigh(updates, weights), self.steps.speeds
        in_flight = max(len(updates), self._training)
        steps = self.steps.num_steps(list(speeds.step_s))
        limit = largest_step(steps, len(updates), in_flight, server_momentum(self))
        # l. 4: b, so that all updates in flight move the model by one slice
        bound = min(1.0, limit / self.rates.mean_discount())
        return shares._replace(scales=shares.scales * bound)

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
        key = getattr(self.leaf, "weighted_by_key", None) or keys.NUM_EXAMPLES
        examples = max(0.0, read_number(metrics, key, 1.0))
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


class ModelAverage(Wrapper):
    r"""Evaluate and return the running average of the global models; training is unchanged.

    .. math:: \bar w_t = \bar w_{t-1} + \max(1/t, 1/R) \, (w_t - \bar w_{t-1})

    With few nodes in a round or server update, the global model leans towards the data of those
    that came last; the average does not. Of integer arrays it has the newest. Polyak and Juditsky,
    "Acceleration of Stochastic Approximation by Averaging", SICON 1992. ValueError for a setting
    out of range, or a strategy that trains trees.

    >>> strategy = ModelAverage(FedBuff(concurrency=3), window=8)

    Parameters
    ----------
    strategy : Strategy, optional
        What trains; FedAvg if left out.
    window : int
        R, rounds or server updates over which models are averaged.
    """

    name: ClassVar[str] = "model_average"
    decides = frozenset({"the evaluated model"})
    outside_of = frozenset({"the global model"})

    def __init__(self, strategy: Strategy | None = None, *, window: int = 8) -> None:
        self.window = check_count("window", window, 1)
        super().__init__(strategy)
        if trains_trees(self.leaf):
            rule = "average models: those of trees have no mean"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        self.average: dict[str, NDArray[Any]] = {}
        self.count = 0

    def part(self) -> float:
        """Return the newest model's part in the average of ``count`` models."""
        return max(1 / self.count, 1 / self.window)

    def add(self, model: ArrayRecord) -> None:
        """Add a model to the average."""
        self.count += 1
        part = self.part()
        for name, array in model.items():
            new = array.numpy()
            if new.dtype.kind != "f":
                self.average[name] = new.copy()
                continue
            # half precision would drift, and new - old might be too large for the type
            wide = new.astype(np.promote_types(new.dtype, np.float32))
            old = self.average.get(name, wide)
            self.average[name] = np.asarray((1 - part) * old + part * wide)

    def averaged(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the average, or these arrays before the first one."""
        if not self.average:
            return arrays
        return ArrayRecord({n: Array(self.average[n].astype(a.dtype)) for n, a in arrays.items()})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the new global model to the average."""
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if arrays is not None:
            self.add(keep_dtypes(arrays, self.given(context).arrays))
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, *more: Any, **named: Any
    ) -> Messages:
        """Send the average to the nodes that evaluate."""
        return super().configure_evaluate(server_round, self.averaged(arrays), *more, **named)

    def on_start(self, run: Run) -> None:
        """Let the server evaluate the average; a run that begins has none yet."""
        if run.round < 0 and not run.continues:
            self.average, self.count = {}, 0
        if (evaluate := run.evaluate_fn) is not None:
            run.evaluate_fn = lambda number, arrays: evaluate(number, self.averaged(arrays))

    def on_finish(self, run: Run) -> None:
        """Return the average."""
        run.arrays = self.averaged(run.arrays)

    def round_info(self) -> dict[str, Any]:
        """Return how many models the average is of."""
        return {"models": min(self.count, self.window)}

    def state_dict(self) -> StateDict:
        """Return the average and the number of models in it."""
        arrays: StateDict = {ARRAYS + name: array for name, array in self.average.items()}
        return {"count": self.count, **arrays}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.count = int(state["count"])
        self.average = {n: np.asarray(array) for n, array in entries_below(ARRAYS, state).items()}


class RecentAverage(ModelAverage):
    """The average of recent models: of few while there are few."""

    called = "FedSlice"

    def part(self) -> float:
        """Return the newest model's part in the average."""
        # l. 5: p_t
        return new_part(self.count, self.window)


DECIDED = SliceSteps.decides | SliceRule.decides | RecentAverage.decides
"""What FedSlice decides."""
