"""A run of synchronous rounds, and the pieces of which another loop can be made.

A loop opens a run (:func:`opened`), and per round calls :func:`train` (or :func:`aggregate`, with
replies that it has collected itself), :func:`evaluate` and :func:`finish_round`, which records
the round and saves the checkpoint through the wrappers' hooks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import DEBUG, INFO, WARNING
from typing import Any, ClassVar, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_hetero._flwr import log, quiet_strategies
from flwr_hetero.progress import Progress, bar
from flwr_hetero.server.aggregate import replaced
from flwr_hetero.server.context import Exchange, Fleet, RoundInfo
from flwr_hetero.server.contract import check_enough_updates, check_run
from flwr_hetero.server.nodes import MINIMA, GridView, is_simulated, online_nodes

Record = dict[str, Any]
"""A round's line of the history."""


class _Wrapper(Protocol):
    """What a loop needs of a wrapper; all but the hooks, of the outermost one only."""

    name: ClassVar[str]
    fleet: Fleet
    remembered: Exchange | None

    def chain(self) -> Sequence[Strategy]: ...
    def wrappers(self) -> Sequence["_Wrapper"]: ...
    def summary(self) -> None: ...
    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        context: Exchange | None = None,
    ) -> list[Message]: ...
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]: ...
    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        context: Exchange | None = None,
    ) -> list[Message]: ...
    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> MetricRecord | None: ...
    def on_start(self, run: "Run") -> None: ...
    def round_info(self) -> dict[str, Any]: ...
    def on_round_end(self, run: "Run", record: Record) -> None: ...
    def on_finish(self, run: "Run") -> None: ...


@dataclass
class Run:
    """A run in progress; a resumed run begins with another model, round and result."""

    strategy: _Wrapper
    grid: Grid
    arrays: ArrayRecord
    num_rounds: int
    timeout_s: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None
    result: Result = field(default_factory=Result)
    round: int = -1
    continues: bool = False
    """Whether it takes up what an earlier run on this grid has left in flight."""
    wall_offset_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    progress: Progress = field(init=False)
    advance: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what ``start`` cannot work with."""
        check_run(self)

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, pauses before a resume left out."""
        return self.wall_offset_s + time.monotonic() - self.started_s

    @property
    def fleet(self) -> Fleet:
        """What lasts for the run."""
        return self.strategy.fleet

    def exchange(self, number: int) -> Exchange:
        """Begin an exchange with nodes in a round."""
        return Exchange(self.fleet, number, self.arrays, self.train_config, self.timeout_s)

    def send(self, context: Exchange) -> list[Message]:
        """Send instructions and wait for the replies; wrappers inside Flower's learn the times."""
        replies = context.send(self.grid)
        for wrapper in self.strategy.wrappers():
            if wrapper.remembered is not None:
                wrapper.remembered.timed_as(context)
        return replies


Loop = Callable[[Run], Result]
"""What takes a run from its first to its last round, or merge."""


def run_rounds(run: Run) -> Result:
    """Train and evaluate in synchronous rounds; round 0 evaluates the initial model only."""
    with opened(run):
        if run.round < 0:
            record_start(run)
        while run.round < run.num_rounds and run.fleet.stop_reason is None:
            number = run.round + 1
            log(DEBUG, "[ROUND %s/%s]", number, run.num_rounds)
            record = train(run, number)
            evaluate(run, record)
            finish_round(run, record)
    run.result.arrays = run.arrays
    return run.result


def record_start(run: Run) -> None:
    """Record round 0: the initial model, evaluated on the server."""
    record = new_record(run, run.exchange(0), [])
    record["global"] = evaluate_centrally(run, 0)
    finish_round(run, record)


@contextmanager
def opened(run: Run, unit: str = "round") -> Iterator[None]:
    """Call the hooks at the start and, also after an error, at the end of a run."""
    strategy, fleet = run.strategy, run.fleet
    names = [getattr(s, "called", "") or type(s).__name__ for s in strategy.chain()]
    log(INFO, "Starting %s", " > ".join(dict.fromkeys(names)))
    fleet.info = RoundInfo()
    run.progress = Progress(run.num_rounds, unit)
    with quiet_strategies(), bar(run.num_rounds) as run.advance:
        strategy.summary()
        try:
            for wrapper in strategy.wrappers():
                inside = wrapper.fleet  # of its own if in one of Flower's wrappers
                inside.clock, inside.started = fleet.clock, True
            for wrapper in strategy.wrappers():
                wrapper.on_start(run)
            yield
            if fleet.stop_reason:
                log(WARNING, "Stopped after %s %d: %s", unit, run.round, fleet.stop_reason)
        finally:
            for wrapper in reversed(strategy.wrappers()):
                wrapper.on_finish(run)


@contextmanager
def answering(run: Run) -> Iterator[Grid]:
    """Show a strategy the nodes without those that keep silent, if there are others.

    Flower's minima, for which it would wait, are at most the nodes shown meanwhile.
    """
    fleet, leaf = run.fleet, run.strategy.chain()[-1]
    silent = fleet.nodes.left_alone(fleet.clock.virtual_s)
    shown = sorted(online_nodes(run.grid) - silent) if silent else []
    if not shown:
        yield run.grid
        return
    minima = {name: min(getattr(leaf, name), len(shown)) for name in MINIMA if hasattr(leaf, name)}
    with replaced(leaf, **minima):
        yield GridView(run.grid, shown)


def train(run: Run, number: int) -> Record:
    """Send training instructions, wait for the replies and aggregate them."""
    run.fleet.info, context = RoundInfo(), run.exchange(number)
    with answering(run) as grid:
        how = number, run.arrays, run.train_config, grid
        messages = run.strategy.configure_train(*how, context)
    return aggregate(run, context, messages, run.send(context))


def aggregate(
    run: Run, context: Exchange, messages: Sequence[Message], replies: list[Message]
) -> Record:
    """Make the next global model of the replies of an exchange; return the record.

    ``messages`` are the instructions that the record tells of.
    """
    leaf, number = run.strategy.chain()[-1], context.round
    if messages and not run.fleet.begun:
        check_enough_updates(leaf, len(context.messages), "the number of nodes asked")
    arrays, metrics = run.strategy.aggregate_train(number, replies, context)
    if arrays is not None:
        run.arrays = arrays
    if metrics is not None:
        run.result.train_metrics_clientapp[number] = metrics
    return new_record(run, context, messages) | {"train": dict(metrics or {})}


def evaluate(run: Run, record: Record) -> None:
    """Evaluate the global model on nodes and on the server, and complete the record."""
    strategy, number, context = run.strategy, record["round"], run.exchange(record["round"])
    with answering(run) as grid:
        strategy.configure_evaluate(number, run.arrays, run.evaluate_config, grid, context)
    metrics = strategy.aggregate_evaluate(number, run.send(context), context)
    if metrics is not None:
        run.result.evaluate_metrics_clientapp[number] = metrics
    record["evaluate"] = dict(metrics or {})
    record |= fairness(run.fleet)
    record["global"] = evaluate_centrally(run, number)
    record["virtual_s"] = run.fleet.clock.virtual_s
    record["failures"] = [failure._asdict() for failure in run.fleet.info.failures]


def fairness(fleet: Fleet) -> Record:
    """Return the record's table of how good the model is on each node, if nodes evaluated."""
    return {"fairness": fleet.info.by_node} if fleet.info.by_node else {}


def evaluate_centrally(run: Run, number: int) -> Record:
    """Evaluate the global model on the server, if there is a function for it."""
    metrics = run.evaluate_fn(number, run.arrays) if run.evaluate_fn else None
    if metrics is None:
        return {}
    run.result.evaluate_metrics_serverapp[number] = metrics
    return dict(metrics)


def new_record(run: Run, context: Exchange, messages: Sequence[Message]) -> Record:
    """Make a round's line for the history, as far as it is known after training."""
    total = sum(context.weights.values())
    return {
        "round": context.round,
        "virtual_s": run.fleet.clock.virtual_s,
        "simulated": is_simulated(run.grid),
        "train": {},
        "evaluate": {},
        "global": {},
        "selected": [context.identity(message.metadata.dst_node_id) for message in messages],
        "weights": {node: weight / total for node, weight in context.weights.items()},
        "latency": context.seconds_by_node(),
        "failures": [],
    }


# --- a round of several updates of the model ---------------------------------------------


def keep_infos(run: Run, record: Record) -> None:
    """Note what wrappers say of an update of the model that is not the last of its round."""
    for wrapper in run.strategy.wrappers():
        if info := run.fleet.hooks.tell(wrapper.round_info):
            record[wrapper.name] = joined(record.get(wrapper.name), info)


def joined(before: Any, after: Any) -> Any:
    """Put two updates' figures together: lists in a row, tables by key, else the later one.

    >>> joined({"nodes": ["a"], "step": 1}, {"nodes": ["b"], "step": 2})
    {'nodes': ['a', 'b'], 'step': 2}
    """
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {key: joined(before.get(key), value) for key, value in after.items()}
    return after


def joined_rounds(before: Record, after: Record, count: int) -> Record:
    """Put the lines of ``count`` updates of a round and of the next one together."""
    record: Record = joined(before, after)
    for name in ("train", "weights"):
        record[name] = _mean(before[name], after[name], 1 / (count + 1))
    return record


def _mean(before: Record, after: Record, share: float) -> Record:
    """Average figures by name; those that are no numbers are left out."""
    names = [key for key, value in (before | after).items() if not isinstance(value, list)]
    return {key: (1 - share) * before.get(key, 0.0) + share * after.get(key, 0.0) for key in names}


def finish_round(run: Run, record: Record) -> None:
    """Let every wrapper add to the record and see it: here it is written, and the run saved."""
    fleet, run.round = run.fleet, record["round"]
    record |= {"wall_s": run.wall_s, **fleet.costs.until(fleet.clock.virtual_s)}
    for wrapper in run.strategy.wrappers():
        if info := fleet.hooks.tell(wrapper.round_info):
            record[wrapper.name] = joined(record.get(wrapper.name), info)
    for wrapper in reversed(run.strategy.wrappers()):
        wrapper.on_round_end(run, record)
    if run.round:
        log(INFO, "%s", run.progress.line(record))
        run.advance(run.round)
    else:
        run.progress.see(record)
