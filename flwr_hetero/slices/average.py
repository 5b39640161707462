"""The average of models, and FedSlice's: nodes train half way to it."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi, Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import trains_trees
from flwr_hetero.arrays import array_of, view_array
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.exchange.aggregate import keep_dtypes
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.records import BUFFERS, arrays_in
from flwr_hetero.server.loop import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import TOWARDS, new_part
from flwr_hetero.state_dict import StateDict, entries_below

ARRAYS = "arrays/"
ADAPTIVE = (FedAdagrad, FedAdam, FedYogi)
"""Server optimisers of which the length of a step does not depend on that of the updates."""


class ModelAverage(Wrapper):
    r"""Evaluate and return the running average of the global models; training is unchanged.

    .. math:: \bar w_t = \bar w_{t-1} + \max(1/t, 1/R) \, (w_t - \bar w_{t-1})

    With few nodes in a round or server update, the global model leans towards the data of those
    that came last; the average does not. Of integer arrays it has the newest. Polyak and Juditsky,
    "Acceleration of Stochastic Approximation by Averaging", SICON 1992. ValueError for a setting
    out of range, or a strategy that trains trees.

    >>> from flwr_hetero.asynchronous.strategy import FedBuff
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

    def add(self, model: Mapping[str, Array]) -> None:
        """Add what nodes return of a model to the average."""
        self.average = {name: old for name, old in self.average.items() if name in model}
        self.count += 1
        part = self.part()
        for name, array in model.items():
            new = view_array(array)
            if new.dtype.kind != "f":
                self.average[name] = new.copy()
                continue
            # Half precision would drift, and the difference might be too large for the type.
            wide = new.astype(np.promote_types(new.dtype, np.float32), copy=False)
            average = np.asarray(part * wide)
            average += (1 - part) * self.average.get(name, wide)
            self.average[name] = average

    def averaged(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the average, or these arrays before the first one."""
        averaged = arrays.copy()
        for name, average in self.average.items():
            averaged[name] = array_of(np.asarray(average, arrays[name].dtype))
        return averaged

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the new global model to the average."""
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if arrays is not None:
            context = self.given(context)
            new = keep_dtypes(arrays, context.arrays)
            self.add({name: new[name] for name in new if name not in context.left_out})
        return arrays, metrics

    def evaluated_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the average."""
        return self.averaged(super().evaluated_model(arrays))

    def on_start(self, run: Run) -> None:
        """Begin a new average in a run that begins."""
        if run.round < 0 and not run.continues:
            self.average = {}
            self.count = 0

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
    """The average of recent models, of few while there are few; nodes train half way to it."""

    called = "FedSlice"

    def __init__(self, strategy: Strategy | None = None, *, window: int = 8) -> None:
        super().__init__(strategy, window=window)
        # The wrapper inside, a SliceRule, which says how far the run has gone.
        self.rule: Any = self.inner
        # The newest model, and the model between it and the average, made once for all nodes.
        self._newest: ArrayRecord | None = None
        self._num_mixed = 0
        self._between = ArrayRecord()
        # The number of models since slices began to become equal.
        self.num_late = 0

    def on_start(self, run: Run) -> None:
        """Begin a new average in a run that begins."""
        super().on_start(run)
        if run.round < 0 and not run.continues:
            self.num_late = 0

    def add(self, model: Mapping[str, Array]) -> None:
        """Add what nodes return of a model to the average, which grows towards the end."""
        self.num_late += self.rule.steps.stage.ending.equal > 0
        super().add(model)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Send nodes a model between the newest one and the average."""
        # An optimizer at the server with a memory goes on by itself, and running statistics of two
        # models fit neither of them nor one between them.
        has_memory = server_momentum(self) or isinstance(self.leaf, ADAPTIVE)
        if has_memory or not self.average or any(name.endswith(BUFFERS) for name in self.average):
            return messages
        # l. 1: steps from there are added to the newest model
        if self._newest is not context.arrays or self._num_mixed != self.count:
            self._newest = context.arrays
            self._num_mixed = self.count
            self._between = self.between(context.arrays)
        between = self._between
        for message in messages:
            for name in arrays_in(message.content):
                message.content[name] = between
        return messages

    def between(self, newest: ArrayRecord) -> ArrayRecord:
        """Return the model between the newest one and the average."""
        between = newest.copy()
        for name, average in self.average.items():
            new = view_array(newest[name])
            if new.dtype.kind == "f":
                mixed = np.asarray(TOWARDS * average)
                mixed += (1 - TOWARDS) * new
                between[name] = array_of(np.asarray(mixed, new.dtype))
        return between

    def part(self) -> float:
        """Return the newest model's part in the average."""
        # l. 5: p_t; l. 7: late in the run all models are of the same objective
        return new_part(self.count, self.window, self.num_late, alike=self.rule.alike)

    def state_dict(self) -> StateDict:
        """Return the average, and how many models it is of."""
        return super().state_dict() | {"num_late": self.num_late}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        # Version 0.1 has none.
        self.num_late = int(state.get("num_late", 0))


def server_momentum(strategy: Wrapper) -> float:
    """Return how much of the last server update FedAvgM repeats in the next one."""
    momentum: float = getattr(strategy.leaf, "server_momentum", 0.0)
    return momentum
