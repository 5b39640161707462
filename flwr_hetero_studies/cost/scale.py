"""CPU time of the server for a reply, by the number of nodes that it knows.

The model is a vector of 20 numbers and nodes reply at once, so that the figures show what the
package itself costs. What the grid and the nodes do is not counted.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.mod import hetero
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    Compressed,
    FedBuff,
    FedSlice,
    Recorded,
    TiFL,
)
from flwr_hetero_studies.core.emulate import ENDLESS, Enough
from flwr_hetero_studies.core.plan import Data, Trial
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.core.record import Case

DIM = 20
UNITS = 4
SIZES = (100, 1_000, 10_000, 100_000)
USUAL = 20
TRAINING = (100, 1_000)
"""Nodes that train at the same time, in most runs and in others."""
WIDE = 10_000
"""Nodes of the fleets in which more than 20 train at the same time."""
LEAST_REPLIES = 1_000
LEAST_ROUNDS = 5
"""What is measured, at least, once all nodes are known."""
PHASE: dict[str, Any] = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}


class AllFirst(FedAvg):
    """FedAvg whose first round has all nodes, so that all are known after it."""

    def __init__(self, share: float) -> None:
        super().__init__(fraction_train=share, fraction_evaluate=0.0)
        self.share = share

    def configure_train(self, server_round: int, *rest: Any) -> Iterable[Message]:
        """Draw the nodes of a round."""
        self.fraction_train = 1.0 if server_round == 1 else self.share
        return super().configure_train(server_round, *rest)


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


STRATEGIES: dict[str, Callable[[AllFirst, int, Path], Strategy]] = {
    "FedAvg": lambda all_first, training, folder: all_first,
    "FedSlice": lambda all_first, training, folder: FedSlice(fedavg(), concurrency=training),
    "FedBuff": lambda all_first, training, folder: FedBuff(
        fedavg(), buffer_size=5, concurrency=training
    ),
    "TiFL": lambda all_first, training, folder: TiFL(fedavg(), training, **PHASE),
    "BiasedLocalSGD": lambda all_first, training, folder: BiasedLocalSGD(all_first, fast_steps=8),
    "CDGraB": lambda all_first, training, folder: CDGraB(all_first, sketch_size=16),
    "Compressed": lambda all_first, training, folder: Compressed(all_first),
    "Recorded": lambda all_first, training, folder: Recorded(all_first, run_dir=folder / "run"),
}
"""Each gets FedAvg with all nodes in the first round, and how many nodes train at a time."""
ASYNCHRONOUS = ("FedSlice", "FedBuff")


def plan() -> Iterator[Trial]:
    fleets = [(nodes, USUAL) for nodes in SIZES] + [(WIDE, training) for training in TRAINING]
    for (nodes, training), strategy in product(fleets, STRATEGIES):
        case = {"experiment": "scale", "name": f"{strategy}, {training} of {nodes} nodes"}
        case |= {"strategy": strategy, "nodes": nodes, "training": training}
        yield Trial(case, alone=True)


class EchoFleet:
    """What the nodes do: a step towards a goal, and orders of four units."""

    def __init__(self) -> None:
        self.samplers: dict[int, OrderedSampler] = {}
        self.app = ClientApp(mods=[hetero])
        self.app.train()(self.train)
        self.app.train("profile")(self.report)

    @staticmethod
    def first() -> ArrayRecord:
        return ArrayRecord({"w": Array(np.zeros(DIM, np.float32))})

    def report(self, message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "acc": random.random()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Take a step, and visit the units in the order that the server asks for."""
        partition = int(context.node_config[keys.PARTITION_ID])
        w = message.content["arrays"]["w"].numpy()
        metrics = {"num-examples": 10, "train-loss": float(np.mean((w - partition) ** 2))}
        steps = message.content["config"].get(keys.NUM_STEPS)
        if steps:
            metrics[keys.NUM_STEPS] = int(steps)
        new = ArrayRecord({"w": Array((w + 0.1 * (partition - w)).astype(np.float32))})
        content = RecordDict({"arrays": new, "metrics": MetricRecord(metrics)})
        order = message.content.config_records.get(keys.ORDER)
        if order:
            content[keys.ORDER] = self.visit(order, partition)
        return Message(content, reply_to=message)

    def visit(self, order: ConfigRecord, partition: int) -> ConfigRecord:
        if partition not in self.samplers:
            self.samplers[partition] = OrderedSampler(UNITS, 1, seed=partition, method="cd-grab")
        sampler = self.samplers[partition]
        sampler.follow(order)
        # Gradients are the same in each round, so that orders settle as in training.
        gradients = np.random.default_rng(partition).standard_normal((UNITS, DIM), np.float32)
        for _ in range(UNITS):
            unit, _ = sampler.next_batch()
            sampler.observe(torch.from_numpy(gradients[unit]))
        return ConfigRecord(sampler.report())


class Meter:
    """CPU time of this process, less what grid and nodes took, and the replies that they sent."""

    def __init__(self) -> None:
        self.replies = 0
        self._apart_s = 0.0
        self._depth = 0

    @property
    def server_s(self) -> float:
        return time.process_time() - self._apart_s

    @contextmanager
    def apart(self) -> Iterator[None]:
        start_s = time.process_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            # One method of a grid may call another.
            if not self._depth:
                self._apart_s += time.process_time() - start_s


class TimedGrid(LocalGrid):
    """An emulated fleet whose own time is not counted."""

    def __init__(self, app: ClientApp, num_nodes: int, meter: Meter) -> None:
        super().__init__(app, named_fleet("paper-5", num_nodes))
        self.meter = meter

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        listed = list(messages)
        self.meter.replies += len(listed)
        with self.meter.apart():
            return super().push_messages(listed)

    def send_and_receive(self, *args: Any, **options: Any) -> Iterable[Message]:
        with self.meter.apart():
            return super().send_and_receive(*args, **options)

    def wait_for_next(self, *args: Any, **options: Any) -> list[Message]:
        with self.meter.apart():
            return super().wait_for_next(*args, **options)


class Mark(NamedTuple):
    """What was spent until the end of a round."""

    round: int
    server_s: float
    replies: int


def run(case: Case, data: Data) -> dict[str, Any]:
    """Run a fleet until all nodes are known, and then for some rounds."""
    random.seed(0)
    training = case["training"]
    meter = Meter()
    nodes = EchoFleet()
    grid = TimedGrid(nodes.app, case["nodes"], meter)
    marks: list[Mark] = []

    def is_over(first: Mark, last: Mark) -> bool:
        enough = last.replies - first.replies >= max(LEAST_REPLIES, 2 * training)
        return enough and last.round - first.round >= LEAST_ROUNDS

    def note(number: int, arrays: ArrayRecord) -> None:
        mark = Mark(number, meter.server_s, meter.replies)
        is_asynchronous = case["strategy"] in ASYNCHRONOUS
        if number >= 1 and (mark.replies >= case["nodes"] or not is_asynchronous):
            marks.append(mark)
            if is_over(marks[0], mark):
                raise Enough

    with tempfile.TemporaryDirectory() as folder, only_errors():
        all_first = AllFirst(training / case["nodes"])
        strategy = STRATEGIES[case["strategy"]](all_first, training, Path(folder))
        begun_s = meter.server_s
        with suppress(Enough):
            strategy.start(grid, nodes.first(), ENDLESS, evaluate_fn=note)
    first = marks[0]
    last = marks[-1]
    spent_s = last.server_s - first.server_s
    return {
        "pass_ms": 1e3 * (first.server_s - begun_s) / first.replies,
        "reply_ms": 1e3 * spent_s / (last.replies - first.replies),
        "round_ms": 1e3 * spent_s / (last.round - first.round),
        "replies": last.replies,
    }
