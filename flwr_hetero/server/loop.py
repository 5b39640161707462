"""The loop of a run, and rounds that wait for their nodes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from logging import DEBUG, INFO, WARNING
from math import inf
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_hetero._flwr import log, quiet_strategies
from flwr_hetero.errors import check_count, check_number, invalid
from flwr_hetero.exchange.aggregate import replaced, why_no_model
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.exchange.nodes import MINIMA, GridView, online_nodes
from flwr_hetero.server.composition import check_first_update, name_of
from flwr_hetero.server.lines import Record, complete, finish_round, keep_infos, new_record


@dataclass
class Run:
    """A run in progress, and the arguments of ``start``."""

    strategy: Any
    """The outermost wrapper."""
    grid: Grid
    arrays: ArrayRecord
    num_rounds: int
    timeout_s: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None
    should_stop: Callable[[int, Result], bool] | None = None
    result: Result = field(default_factory=Result)
    final: ArrayRecord | None = None
    """The model that is returned, if the newest one has been trained further since."""
    round: int = -1
    continues: bool = False
    """Whether it takes up what an earlier run on this grid has left in flight."""
    wall_offset_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    unit: str = "round"
    logged_s: float = 0.0
    """When the round ended whose line was last written, by the fleet's clock."""

    def __post_init__(self) -> None:
        """Refuse what is easily mistaken, before any training."""
        check_count("num_rounds", self.num_rounds)
        if self.timeout_s != inf:
            check_number("timeout", self.timeout_s, "(0, inf)", "or None, for no limit")
        arrays: Any = self.arrays
        if not isinstance(arrays, ArrayRecord):
            hint = "ArrayRecord(model.state_dict()), or ArrayRecord([...]) of NumPy arrays"
            raise invalid("initial_arrays", type(arrays).__name__, "be an ArrayRecord", hint)
        if not arrays:
            raise invalid("initial_arrays", arrays, "hold an array")
        if reason := why_no_model(arrays):
            raise ValueError(f"initial_arrays cannot be trained: it {reason}.")

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, pauses before a resume left out."""
        return self.wall_offset_s + time.monotonic() - self.started_s

    @property
    def fleet(self) -> Fleet:
        """What lasts for the run."""
        return self.strategy.fleet  # type: ignore[no-any-return]

    def exchange(self, number: int) -> Exchange:
        """Begin an exchange with nodes in a round."""
        return Exchange(self.fleet, number, self.arrays, self.train_config, self.timeout_s)


class Rounds(Protocol):
    """What a run does between two lines of its history."""

    unit: str
    """What a round is called in the log."""

    def begin(self, run: Run) -> None:
        """Prepare a run, after the hooks at its start."""

    def next(self, run: Run) -> Record:
        """Train the global model for a round, and evaluate it; return the round's line."""

    def end(self, run: Run) -> None:
        """End a run, before the hooks at its end."""


def run_all(run: Run, rounds: Rounds) -> Result:
    """Train round after round: the only loop, whatever a round is."""
    with opened(run, rounds.unit):
        if run.round < 0:
            record_start(run)
        rounds.begin(run)
        while run.round < run.num_rounds and run.fleet.stop_reason is None:
            log(DEBUG, "[ROUND %s/%s]", run.round + 1, run.num_rounds)
            record = rounds.next(run)
            stop_if_asked(run, record)
            finish_round(run, record)
        rounds.end(run)
    run.result.arrays = run.arrays
    return run.result


def stop_if_asked(run: Run, record: Record) -> None:
    """Ask ``should_stop`` whether a round is the last one, and say so in the round's line."""
    if run.should_stop is None:
        return
    number = record["round"]
    run.result.arrays = run.final or run.strategy.evaluated_model(run.arrays)
    if run.should_stop(number, run.result) and number < run.num_rounds:
        run.fleet.stop_reason = record["stopped"] = "should_stop returned True"


class SynchronousRounds:
    """Rounds that end when all nodes, or enough of them, have replied."""

    unit = "round"

    def begin(self, run: Run) -> None:
        """Do nothing, because nothing goes on between two rounds."""

    def next(self, run: Run) -> Record:
        """Train, and evaluate the new model when all training is over."""
        record = train(run, run.round + 1)
        evaluate(run, record)
        keep_infos(run, record)
        complete(run, record)
        return record

    def end(self, run: Run) -> None:
        """Do nothing, because nothing is left."""


def record_start(run: Run) -> None:
    """Record round 0: the initial model, evaluated on the server."""
    record = new_record(run, run.exchange(0), []) | {"global": evaluate_centrally(run, 0)}
    keep_infos(run, record)
    finish_round(run, record)


@contextmanager
def opened(run: Run, unit: str = "round") -> Iterator[None]:
    """Call the hooks at the start and, also after an error, at the end of a run."""
    strategy = run.strategy
    fleet = run.fleet
    log(INFO, "Starting %s", " > ".join(dict.fromkeys(map(name_of, strategy.chain()))))
    fleet.begin_round()
    fleet.is_running = True
    run.fleet.stop_reason = None
    run.unit = unit
    with quiet_strategies():
        strategy.summary()
        try:
            for wrapper in strategy.wrappers():
                wrapper.on_start(run)
            try:
                yield
            finally:
                run.arrays = run.final or strategy.evaluated_model(run.arrays)
            if fleet.stop_reason:
                log(WARNING, "Stopped after %s %d: %s", unit, run.round, fleet.stop_reason)
        finally:
            for wrapper in reversed(strategy.wrappers()):
                wrapper.on_finish(run)
            fleet.is_running = False


@contextmanager
def answering(run: Run) -> Iterator[Grid]:
    """Show a strategy the nodes that are not backed off, if there are others."""
    silent = run.fleet.nodes.backed_off(run.fleet.clock.virtual_s)
    shown = sorted(online_nodes(run.grid) - silent) if silent else []
    with showing(run.strategy.leaf, run.grid, shown) if shown else nullcontext(run.grid) as view:
        yield view


@contextmanager
def showing(leaf: Any, grid: Grid, shown: Sequence[int]) -> Iterator[Grid]:
    """Show some nodes only; Flower's minima, for which it would wait, are at most these then."""
    minima = {name: min(getattr(leaf, name), len(shown)) for name in MINIMA if hasattr(leaf, name)}
    with replaced(leaf, **minima):
        yield GridView(grid, shown)


def train(run: Run, number: int) -> Record:
    """Send training instructions, wait for the replies and aggregate them."""
    run.fleet.begin_round()
    context = run.exchange(number)
    with answering(run) as grid:
        messages = run.strategy.configure_train(number, run.arrays, run.train_config, grid, context)
    return aggregate(run, context, messages, context.send(run.grid))


def aggregate(
    run: Run, context: Exchange, messages: Sequence[Message], replies: list[Message]
) -> Record:
    """Make the next global model of an exchange's replies; its record tells of ``messages``."""
    if messages and not run.fleet.begun:
        check_first_update(run.strategy, len(context.messages), len(online_nodes(run.grid)))
    arrays, metrics = run.strategy.aggregate_train(context.round, replies, context)
    if arrays is not None:
        run.arrays = arrays
    if metrics is not None:
        run.result.train_metrics_clientapp[context.round] = metrics
    return new_record(run, context, messages) | {"train": dict(metrics or {})}


def evaluate(run: Run, record: Record) -> None:
    """Evaluate the global model on nodes and on the server, and complete the record."""
    number = record["round"]
    context = run.exchange(number)
    model = run.strategy.evaluated_model(run.arrays)
    with answering(run) as grid:
        run.strategy.configure_evaluate(number, model, run.evaluate_config, grid, context)
    metrics = run.strategy.aggregate_evaluate(number, context.send(run.grid), context)
    if metrics is not None:
        run.result.evaluate_metrics_clientapp[number] = metrics
    record["evaluate"] = dict(metrics or {})
    record["global"] = evaluate_centrally(run, number)


def evaluate_centrally(run: Run, number: int) -> Record:
    """Evaluate the global model on the server, if there is a function for it."""
    if run.evaluate_fn is None:
        return {}
    metrics = run.evaluate_fn(number, run.strategy.evaluated_model(run.arrays))
    if metrics is None:
        return {}
    run.result.evaluate_metrics_serverapp[number] = metrics
    return dict(metrics)
