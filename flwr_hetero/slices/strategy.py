"""FedSlice, the recommended strategy: three wrappers in one; and the average that it returns."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import trains_trees
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.exchange.aggregate import keep_dtypes
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.records import BUFFERS, array_of, arrays_in, mixed, view_array
from flwr_hetero.server.composition import check_enough_updates, name_of
from flwr_hetero.server.loop import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import TOWARDS, buffer_size, new_part
from flwr_hetero.slices.rule import ADAPTIVE, QUARTER, SliceRule, SliceSteps, server_momentum
from flwr_hetero.state_dict import StateDict, entries_below

ARRAYS = "arrays/"


class FedSlice(Wrapper):
    r"""Train in slices of time instead of rounds, and return the average of recent models.

    Each node takes the steps that fit into a slice of time, in which a fast node takes
    ``slice_steps``. The server updates the model whenever a quarter of the nodes in flight have
    replied. A round ends when the nodes have trained on as many examples as in a round of FedAvg,
    and then the model is evaluated once. ValueError for a setting out of range, or a strategy that
    selects nodes, sets steps or trains trees. MissingClientSupportError in the first round if no
    node takes the steps that it is asked for.

    >>> FedSlice(concurrency=5, window=8).window
    8

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates, as for :class:`FedBuff`; FedAvg if left out. It is copied: see
        :class:`Wrapper`.
    concurrency : int, optional
        Number of nodes in flight. None: all nodes that are online.
    slice_steps : int
        Smallest number of steps that a fast node takes in a slice. If a message has a fixed cost, a
        slice takes at least four times as long, but never longer than the node's job in FedAvg.
    rate_correction : float
        Power in [0, 1] by which differences in reporting rates are undone. 1: a node gains no
        influence by replying more often. 0: a node that replies twice as often counts twice.
    window : int
        Largest number of models in the average that is evaluated and returned. After t server
        updates it contains about the last sqrt(2t) models. Late in a run it grows.
    keep_optimizer : bool
        Whether the torch optimizers of nodes continue from slice to slice, so that no momentum is
        lost. Each node keeps a state as large as the model, or twice that for Adam. A simulation
        keeps the states of all nodes.
    total_rounds : int, optional
        Rounds of the whole training, if ``start`` is called for a few rounds at a time. None: the
        rounds of one ``start``.
    seed : int
        Seed of the draw of nodes.

    Notes
    -----
    A node counts by its examples and its steps. Late in a run, slices become equal in steps, so
    that the run ends at FedAvg's objective: in full if at most a quarter of the nodes train at the
    same time, and in part if up to three quarters do.

    Together, all updates in flight move the model no further than one slice of a fast node, so that
    FedAvg's learning rate fits. Updates are smaller for ``FedAvgM``, whose momentum repeats them,
    and the ``eta`` of ``FedAdam`` is divided among the nodes in flight. A weighted update longer
    than five medians is shortened to that length. A node is drawn less often the longer its slice
    takes, so that all nodes are in flight for equally long. In Flower's simulation without emulated
    devices, no more messages are in flight than its workers need. If all nodes train at the same
    time and are about equally fast, a server update takes all replies that arrive at about the same
    time. A node that has spent a tenth of the time on evaluation evaluates only the last model.
    ``start`` continues with the messages in flight if it gets the arrays that the last ``start``
    returned, and the same grid. It then trains on while its last model is evaluated. Once half of
    the nodes have been asked, nodes that train for longer than 0.3 of a round are left out of that
    evaluation, so that its figures are mostly those of fast nodes.
    """

    name: ClassVar[str] = "fedslice"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        slice_steps: int = 10,
        rate_correction: float = 1.0,
        window: int = 32,
        keep_optimizer: bool = True,
        total_rounds: int | None = None,
        seed: int = 0,
    ) -> None:
        self.slice_steps = check_count("slice_steps", slice_steps, 1)
        if total_rounds is not None:
            check_count("total_rounds", total_rounds, 1)
        self.total_rounds = total_rounds
        self.keep_optimizer = check_choice("keep_optimizer", keep_optimizer, (True, False))
        # Conflicts are refused here: the errors of the parts would name SliceSteps or SliceRule.
        for inner in strategy.wrappers() if isinstance(strategy, Wrapper) else ():
            if both := inner.decides & DECIDED:
                rule = f"leave {' and '.join(sorted(both))} to FedSlice"
                raise invalid("strategy", name_of(inner), rule, "use one of the two")
        self.steps = SliceSteps(strategy, slice_steps, keep_optimizer)
        self.rule = SliceRule(self.steps, concurrency, rate_correction, total_rounds, seed)
        average = RecentAverage(self.rule, window=window)
        self.concurrency = concurrency
        self.rate_correction = rate_correction
        self.window = window
        self.seed = seed
        self.parts = (average, self.rule, self.steps)
        self.decides = DECIDED
        super().__init__(average)
        self.strategy = self.steps.inner
        check_number("server_momentum", server_momentum(self), "[0, 1)")
        if concurrency is not None:
            check_enough_updates(self.leaf, concurrency, "concurrency", buffer_size, QUARTER)

    @property
    def node_limit(self) -> float | None:
        """Largest share of all updates from one node, in even shares; None: no limit."""
        return self.rule.node_limit

    @node_limit.setter
    def node_limit(self, limit: float | None) -> None:
        self.rule.node_limit = limit

    def round_info(self) -> dict[str, Any]:
        """Return the round's server updates, and its examples beside those that were wanted."""
        return self.rule.round_facts


# --- the average of models ------------------------------------------------------------------


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
            self.average[name] = mixed(self.average.get(name, wide), wide, part)

    def evaluated_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the average, or the newest model before there is one."""
        arrays = super().evaluated_model(arrays)
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

    def add(self, model: Mapping[str, Array]) -> None:
        """Add what nodes return of a model to the average, which grows towards the end."""
        before = self.num_late if self.count else 0
        self.num_late = before + (self.rule.steps.stage.ending.equal > 0)
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
                between[name] = array_of(mixed(new, average, TOWARDS).astype(new.dtype, copy=False))
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
        self.num_late = int(state["num_late"])


DECIDED = SliceSteps.decides | SliceRule.decides | RecentAverage.decides
"""Aspects of training that FedSlice decides."""
