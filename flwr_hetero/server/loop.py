"""The loop of a run, rounds that wait for their nodes, and the line that each round leaves."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from logging import DEBUG, INFO, WARNING
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_hetero._flwr import log, quiet_strategies
from flwr_hetero.errors import check_count, check_number, invalid
from flwr_hetero.exchange.aggregate import replaced, why_no_model
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.exchange.nodes import MINIMA, GridView, is_simulated, online_nodes
from flwr_hetero.records import Latency, metrics_in, read_number
from flwr_hetero.server.composition import check_first_update, name_of

MAX_NODES = 100
"""Nodes in the table of an evaluation: those on which the model is worst."""
Record = dict[str, Any]
"""A round's line of the history."""


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


# --- a round's line for the history and for the log ------------------------------------------
def complete(run: Run, record: Record) -> None:
    """Add to a record what is known when all evaluation is over."""
    fleet = run.fleet
    record |= {"virtual_s": fleet.clock.virtual_s, "failures": fleet.failures}
    record |= {"fairness": fleet.by_node} if fleet.by_node else {}
    # A mean alone may be that of one node.
    limited = fleet.reported.pop("limited", {})
    record |= {"limited": limited} if limited else {}
    for kind, metrics in fleet.reported.items():
        ranges = {name: [min(v), median(v), max(v)] for name, v in metrics.items() if v}
        record |= {f"{kind}_range": ranges} if ranges else {}


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
        **({"shortened": context.shortened} if context.shortened else {}),
        **_times_by_node(context),
        "failures": [],
    }


def _times_by_node(context: Exchange) -> Record:
    """Return how long each node took for a message on average; of real nodes also by part."""
    latencies: dict[str, list[Latency]] = defaultdict(list)
    for metadata in (message.metadata for message in context.messages):
        if latency := context.latency.get(metadata.message_id):
            latencies[context.identity(metadata.dst_node_id)].append(latency)
    total = {node: sum(each.seconds for each in own) / len(own) for node, own in latencies.items()}
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for node, own in latencies.items():
        divided = [each.parts for each in own if each.parts]
        for part in dict.fromkeys(part for parts in divided for part in parts):
            mean_s = fmean(parts.get(part, 0.0) for parts in divided)
            # Milliseconds are enough, because a line has a number for each node.
            seconds[part][node] = round(mean_s, 3)
    return {"latency": total, **({"seconds": dict(seconds)} if seconds else {})}


def metric_of(names: Sequence[str]) -> str:
    """Return the first name with "acc" in it, else with "loss"; empty if there is none."""
    return next((n for part in ("acc", "loss") for n in names if part in n.lower()), "")


def by_node(context: Exchange, replies: Sequence[Message]) -> Record:
    """Sum up how good a model is on each node: mean, mean of the worst tenth, and a table."""
    metrics = {
        context.identity(reply.metadata.src_node_id): own
        for reply in replies
        for own in metrics_in(reply.content).values()
    }
    metric = metric_of([name for own in metrics.values() for name in own])
    read = {node: read_number(own, metric) for node, own in metrics.items()}
    known = {node: value for node, value in read.items() if isfinite(value)}
    if not known:
        return {}
    is_loss = "acc" not in metric.lower()
    worst_first = dict(sorted(known.items(), key=lambda pair: pair[1], reverse=is_loss))
    values = [*worst_first.values()]
    return {
        "metric": metric,
        "nodes": len(known),
        "mean": float(np.mean(values)),
        "worst_tenth": float(np.mean(values[: -(-len(known) // 10)])),
        "by_node": dict(islice(worst_first.items(), MAX_NODES)),
    }


def keep_infos(run: Run, record: Record) -> None:
    """Note what wrappers say of an update of the model, which may not be the last of its round."""
    for wrapper in run.strategy.wrappers():
        if info := wrapper.round_info():
            record[wrapper.name] = joined(record.get(wrapper.name), info)


def finish_round(run: Run, record: Record) -> None:
    """Let every wrapper add to the record and see it: here it is written, and the run saved."""
    fleet = run.fleet
    run.round = record["round"]
    record |= {"wall_s": run.wall_s, **fleet.costs.until(fleet.clock.virtual_s)}
    # The innermost comes first, so that the outermost writes what all have added.
    for wrapper in reversed(run.strategy.wrappers()):
        wrapper.on_round_end(run, record)
    if run.round:
        log(INFO, "%s", log_line(run, record))
    run.logged_s = record["virtual_s"]


def log_line(run: Run, record: Record) -> str:
    """Write a round's line of the log: who trained for how long, how well, and who failed."""
    clock_s = record["virtual_s"]
    width = len(str(run.num_rounds))
    tiers = [part["tier"] for part in record.values() if isinstance(part, dict) and "tier" in part]
    parts = [
        f"{run.unit} {record['round']:>{width}}/{run.num_rounds}",
        *(f"tier {'-' if tier is None else tier}" for tier in tiers),
        # One node may train several times.
        f"{len(set(record['selected'])):>2} nodes",
        f"{clock_s - run.logged_s:7.2f} s  at {clock_s:6.1f} s",
    ]
    # The server's figures go before those of nodes.
    figures = record["train"] | record["evaluate"] | record["global"]
    numbers = {name: v for name, v in figures.items() if isinstance(v, int | float)}
    if name := metric_of([*reversed(numbers)]):
        ranges = record.get("train_range", {}) | record.get("evaluate_range", {})
        usual = "" if name in record["global"] else ranges.get(name, "")
        parts.append(f"{name} {numbers[name]:.4g}" + (usual and f" (median {usual[1]:.4g})"))
    if failed := list(dict.fromkeys(failure["node"] for failure in record["failures"])):
        more = f" and {len(failed) - 2} more" if len(failed) > 2 else ""
        parts.append(f"failed: {', '.join(failed[:2])}{more}")
    return "  ".join(parts)


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
