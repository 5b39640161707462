"""The run: Flower's own loop, with checked replies, a fleet clock and a history."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_hetero._flwr import log
from flwr_hetero.records import payload_bytes
from flwr_hetero.server.exchange import Exchange, exchange

if TYPE_CHECKING:
    from flwr_hetero.server.wrapper import Wrapper


EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class Run:
    """A run in progress; hooks may look at it, and a resumed run begins with another state."""

    strategy: "Wrapper"
    grid: Grid
    arrays: ArrayRecord
    num_rounds: int
    timeout_s: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    result: Result = field(default_factory=Result)
    round: int = -1
    wall_offset_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, pauses before a resume left out."""
        return self.wall_offset_s + time.monotonic() - self.started_s

    def exchange(self, messages: Sequence[Message], timeout_s: float | None = None) -> Exchange:
        """Send instructions, wait for replies, and move the session's clock."""
        return timed_exchange(
            self.strategy, self.grid, messages, self.timeout_s if timeout_s is None else timeout_s
        )


def timed_exchange(
    strategy: "Wrapper", grid: Grid, messages: Sequence[Message], timeout_s: float
) -> Exchange:
    """Send instructions, wait for replies, and move the clock of a strategy's session."""
    session = strategy.session
    session.timeout_s = timeout_s
    done = exchange(grid, messages, timeout_s, session.enough, emulated=session.emulated)
    session.round_trip_s = done.round_trip_s
    session.virtual_s += done.virtual_s
    session.last_exchange_s = done.virtual_s
    session.wall_s += done.wall_s
    return done


def run_rounds(
    strategy: "Wrapper",
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: EvaluateFn | None,
) -> Result:
    """Run federated learning with a nest of wrappers; arguments as for ``Strategy.start``."""
    run = Run(
        strategy=strategy,
        grid=grid,
        arrays=initial_arrays,
        num_rounds=num_rounds,
        timeout_s=timeout,
        train_config=ConfigRecord() if train_config is None else train_config,
        evaluate_config=ConfigRecord() if evaluate_config is None else evaluate_config,
        evaluate_fn=evaluate_fn,
    )
    log(INFO, "Starting %s:", " > ".join(type(s).__name__ for s in strategy.chain()))
    strategy.summary()
    wrappers = strategy.wrappers()
    try:
        for wrapper in wrappers:
            wrapper.on_start(run)
        if run.round < 0:
            _finish_round(run, _round_zero(run))
        while run.round < num_rounds and strategy.session.stop_reason is None:
            _finish_round(run, _one_round(run, run.round + 1))
        if strategy.session.stop_reason:
            log(WARNING, "Stopped after round %d: %s", run.round, strategy.session.stop_reason)
    finally:
        for wrapper in reversed(wrappers):
            wrapper.on_finish(run)
    run.result.arrays = run.arrays
    return run.result


def _round_zero(run: Run) -> dict[str, Any]:
    record = _record(run, 0)
    record["global"] = _evaluate_centrally(run, 0)
    return record


def _one_round(run: Run, number: int) -> dict[str, Any]:
    strategy, result = run.strategy, run.result
    log(INFO, "")
    log(INFO, "[ROUND %s/%s]", number, run.num_rounds)
    train = run.exchange(strategy.configure_train(number, run.arrays, run.train_config, run.grid))
    up = sum(payload_bytes(m.content) for m in train.replies if m.has_content())
    arrays, metrics = strategy.aggregate_train(number, train.replies)
    if arrays is not None:
        run.arrays = arrays
    if metrics is not None:
        result.train_metrics_clientapp[number] = metrics
    record = _record(run, number, up=up)
    record["weights"] = _shares(strategy.session.weights)
    evaluate = run.exchange(
        strategy.configure_evaluate(number, run.arrays, run.evaluate_config, run.grid)
    )
    evaluated = strategy.aggregate_evaluate(number, evaluate.replies)
    if evaluated is not None:
        result.evaluate_metrics_clientapp[number] = evaluated
    record["global"] = _evaluate_centrally(run, number)
    record |= {
        "train": dict(metrics or {}),
        "evaluate": dict(evaluated or {}),
        "virtual_s": strategy.session.virtual_s,
        "failures": [{"node": f.node, "reason": f.reason} for f in strategy.session.failures],
    }
    _log_round(record)
    return record


def _record(run: Run, number: int, up: int = 0) -> dict[str, Any]:
    """Make a round's line for the history, as far as it is known after training."""
    session = run.strategy.session
    asked = session.asked if number else []
    return {
        "round": number,
        "virtual_s": session.virtual_s,
        "bytes_down": sum(payload_bytes(message.content) for message in asked),
        "bytes_up": up,
        "train": {},
        "evaluate": {},
        "global": {},
        "selected": [session.registry.identity(m.metadata.dst_node_id) for m in asked],
        "weights": {},
        "latency": {session.registry.identity(n): v.seconds for n, v in session.latency.items()},
        "failures": [],
    }


def _shares(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {node: weight / total for node, weight in weights.items()}


def _evaluate_centrally(run: Run, number: int) -> dict[str, Any]:
    metrics = run.evaluate_fn(number, run.arrays) if run.evaluate_fn else None
    if metrics is None:
        return {}
    run.result.evaluate_metrics_serverapp[number] = metrics
    return dict(metrics)


def _finish_round(run: Run, record: dict[str, Any]) -> None:
    run.round = record["round"]
    wrappers = run.strategy.wrappers()
    record["wall_s"] = run.wall_s
    for wrapper in wrappers:
        if info := wrapper.round_info():
            record[wrapper.name] = info
    for wrapper in reversed(wrappers):
        wrapper.on_round_end(run, record)


def _log_round(record: dict[str, Any]) -> None:
    figures = {**record["train"], **record["evaluate"], **record["global"]}
    text = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if _is_number(value))
    log(
        INFO,
        "\t└──> %.1f s on the fleet's clock, %d nodes, %d failures: %s",
        record["virtual_s"],
        len(record["selected"]),
        len(record["failures"]),
        text or "no metrics",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
