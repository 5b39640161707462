"""FedSlice: the composition that is recommended, and what a round of it is."""

from collections.abc import Mapping
from logging import INFO, WARNING
from math import inf, nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.asynchronous.rule import Arrival
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.baselines.model_average import ModelAverage
from flwr_hetero.biased_local_sgd.node_speeds import Job
from flwr_hetero.biased_local_sgd.step_budget import MAX_RATIO, LocalSteps
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import config_of, payload_bytes, read_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import check_enough_updates, check_unscaled, name_of
from flwr_hetero.server.nodes import is_simulated, online_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import buffer_size, largest_step, new_part, slice_steps
from flwr_hetero.state_dict import StateDict

MUCH = 4e9
"""Bytes of optimizers' states above which a simulation is warned."""


class FedSlice(Wrapper):
    r"""Train in slices of time instead of rounds, and return the average of recent models.

    Each node takes the steps that fit a slice, in which a quick node takes ``slice_steps``. The
    server updates the model whenever a quarter of the nodes in flight have replied.

    **A round is equal work.** It ends when the nodes have trained on as many examples as a round
    of FedAvg with the nodes in flight would, so that ``num_rounds`` means the same. A round has
    one line of history, one ``evaluate_fn`` and one evaluation on nodes.

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
        Largest number of models in the average that is evaluated and returned. While there are
        fewer than sixteen times as many, it is of about the last sixteenth.
    keep_optimizer : bool
        Nodes' torch optimizers go on from slice to slice: no momentum is lost. Each node keeps a
        state as large as the model, or twice that for Adam.
    seed : int
        Of the draw of nodes.

    Raises
    ------
    ValueError
        If a setting is out of range, or the strategy selects nodes, sets steps or trains trees.
    MissingHelpError
        In the first round, if no node takes the steps that it is asked for.

    Notes
    -----
    All updates in flight move the model no further than a slice of a quick node would: FedAvg's
    learning rate suits equal nodes, too.

    A round's evaluation goes to nodes when they are idle next. One that has evaluated for a tenth
    of the time is left out, but for the last round's.

    ``start`` on the same grid with the arrays that the last ``start`` returned takes up what was
    in flight, so that a loop of single rounds costs hardly more than one run.

    References
    ----------
    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022;
    Shamir and Zhang, "Stochastic Gradient Descent for Non-smooth Optimization", ICML 2013.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = FedSlice(FedAdam(), concurrency=5)
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
        check_number("rate_correction", rate_correction, "[0, 1]")
        check_number("step_correction", step_correction, "[0, 1]")
        check_count("window", window, 1)
        check_choice("keep_optimizer", keep_optimizer, (True, False))
        _refuse_parts(strategy)
        self.slices = Slices(strategy, slice_steps, step_correction, keep_optimizer)
        self.engine = SliceBuffer(
            self.slices, concurrency=concurrency, rate_correction=rate_correction, seed=seed
        )
        average = RecentAverage(self.engine, rounds=window)
        self.parts = average, self.engine, self.slices
        self.decides = frozenset().union(*(part.decides for part in self.parts))
        super().__init__(average)
        if concurrency is not None:
            check_enough_updates(self.leaf, buffer_size(concurrency), "concurrency")

    def round_info(self) -> dict[str, Any]:
        """Return the server updates of this round, and examples trained on of those wanted."""
        return self.engine.round_facts

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        count, steps = self.engine.concurrency, self.slices.fast_steps
        nodes = "all nodes" if count is None else f"{count} nodes"
        text = "\t├──> FedSlice: %s in flight, %d steps of a quick node in a slice"
        log(INFO, text, nodes, steps)
        log(INFO, "\t├──> A round is over after as many examples as one of FedAvg with them has")
        self.slices.inner.summary()


def _refuse_parts(strategy: Strategy | None) -> None:
    """Refuse wrappers that decide what FedSlice decides, before its parts say how they may go."""
    own = Slices.decides | SliceBuffer.decides | RecentAverage.decides
    for inner in strategy.wrappers() if isinstance(strategy, Wrapper) else ():
        if both := own & inner.decides:
            rule = f"leave {' and '.join(sorted(both))} to FedSlice"
            raise invalid("strategy", name_of(inner), rule, "use one of the two")


# --- its parts -----------------------------------------------------------------------------


class Slices(LocalSteps):
    """Steps that fit a slice, whatever a message costs."""

    called = "FedSlice"

    def __init__(
        self, strategy: Strategy | None, fast_steps: int, correction: float, keeps: bool
    ) -> None:
        super().__init__(strategy, fast_steps, budget="slice", weighting="examples")
        self.correction, self._has_warned = correction, False
        self.keeps, self._has_weighed = keeps, not keeps
        if correction:
            check_unscaled(self, "step_correction", correction)

    def num_steps(self, nodes: list[str]) -> NDArray[np.int64]:  # type: ignore[override]
        """Return the steps of each node's next slice; shape (len(nodes),)."""
        speeds = self.speeds
        return slice_steps(
            speeds.quick_round_s(self.fast_steps, with_link=False),
            [speeds.step_s.get(node, nan) for node in nodes],
            [speeds.link_s.get(node, nan) for node in nodes],
            [speeds.jobs[node].steps if node in speeds.jobs else inf for node in nodes],
        )

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Ask nodes to go on with their optimizers, too."""
        self._weigh_optimizers(context, grid)
        for message in super().on_instructions(context, messages, grid):
            config_of(message)[keys.KEEP_OPTIMIZER] = self.keeps
        return messages

    def _weigh_optimizers(self, context: Exchange, grid: Grid) -> None:
        """Warn once where a simulation holds large states of all nodes in this memory."""
        if self._has_weighed:
            return
        self._has_weighed = True
        kept = payload_bytes(RecordDict({"arrays": context.arrays})) * len(online_nodes(grid))
        if is_simulated(grid) and kept > MUCH:
            text = (
                "FedSlice: the optimizers' states of all nodes may take %.0f GB of memory in this "
                "simulation, twice that for Adam; keep_optimizer=False begins anew in each message"
            )
            log(WARNING, text, kept / 1e9)

    def _say_what_is_optimised(self) -> None:
        """Say nothing yet: the first times are those of warm-ups."""

    def say_whose_data_count(self) -> None:
        """Log once whose data count more, where steps differ much."""
        if self._has_warned or not self.speeds.step_s:
            return
        steps = self.num_steps(list(self.speeds.step_s))
        least, most = int(steps.min()), int(steps.max())
        if most > MAX_RATIO * least:
            self._has_warned = True
            text = (
                "FedSlice: nodes take %d to %d steps in a slice, and quick nodes' data count more"
            )
            log(INFO, f"{text}; step_correction=1 and rate_correction=1 undo that", least, most)


class SliceBuffer(FedBuff):
    """The engine without rounds, and rounds of equal work."""

    called = "FedSlice"
    unit = "round"
    evaluates_each_round = True

    def __init__(
        self, strategy: Slices, *, concurrency: int | None, rate_correction: float, seed: int
    ) -> None:
        how: dict[str, Any] = {"weighting": "examples", "rate_correction": rate_correction}
        super().__init__(strategy, concurrency=concurrency, max_weight=None, seed=seed, **how)
        self.slices = strategy
        self.trained, self.updates, self._in_flight = 0.0, 0, 1
        self.round_facts: dict[str, Any] = {}
        self._has_said_cut = False

    def _usual_size(self, in_flight: int) -> int:
        self._in_flight = in_flight
        return buffer_size(in_flight)

    def _even(self, replies: list[Message], discounts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weigh down what is stale, and server updates that would move the model too far."""
        steps = self.slices.num_steps(list(self.slices.speeds.step_s))
        limit = largest_step(steps, len(replies), max(len(replies), self._in_flight))
        return super()._even(replies, discounts) * min(1.0, limit / self._usual_discount)

    def _examples_of(self, arrival: Arrival) -> float:
        """Return on how many examples a node trained; of its whole job if it does not say."""
        (metrics,) = arrival.reply.content.metric_records.values()
        examples = max(0.0, read_number(metrics, self._weight_key or keys.NUM_EXAMPLES, 1.0))
        job = self.slices.speeds.jobs.get(self.identity(arrival.sent.node_id))
        steps = read_number(metrics, keys.NUM_STEPS, 0.0)
        if job is None or not steps or job.steps == inf:
            return examples
        return examples * job.passes * min(1.0, steps / job.steps)

    def ends_round(self, team: int) -> bool:
        """Return whether nodes have trained as much as in a round of FedAvg."""
        self.updates += 1
        self.trained += sum(map(self._examples_of, self._arrivals.values()))
        wanted = self._in_flight * _mean_examples(self.slices.speeds.jobs)
        has_help = bool(self.slices.speeds.jobs)  # or the run might end before it is missed
        if is_over := has_help and self.trained >= wanted:
            self.round_facts = {
                "updates": self.updates,
                "examples": self.trained,
                "examples-wanted": wanted,
            }
            self.trained, self.updates = max(0.0, self.trained - wanted), 0
            self.slices.say_whose_data_count()
        return is_over

    def _note(self, replies: list[Any], **more: Any) -> None:
        """Say once that weights are cut."""
        super()._note(replies, **more)
        if more.get("clipped_share", 0.0) > 0 and not self._has_said_cut:
            self._has_said_cut = True
            text = (
                "FedSlice: a node of this server update (%s) replies so much more rarely than the "
                "others that its weight is cut: its data count less than rate_correction says"
            )
            log(INFO, text, ", ".join(self.round_info()["nodes"]))

    def state_dict(self) -> StateDict:
        """Return FedBuff's state, and what is trained of a round."""
        return super().state_dict() | {"trained": self.trained}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        own = dict(state)
        self.trained = float(str(own.pop("trained", 0.0)))
        super().load_state_dict(own)


def _mean_examples(jobs: Mapping[str, Job]) -> float:
    known = [job.examples for job in jobs.values() if job.examples > 0]
    return sum(known) / len(known) if known else 0.0


class RecentAverage(ModelAverage):
    """The average of recent models: of few while there are few."""

    called = "FedSlice"

    def _part(self) -> float:
        return new_part(self.count, self.rounds)
