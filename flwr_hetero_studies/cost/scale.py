"""CPU time of the server for a reply, by the number of nodes that it knows.

The model is a vector of 20 numbers and nodes reply at once, so that the figures show what the
package itself costs. What the grid and the nodes do is not counted.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import NodeInfo, set_message_id
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
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.core.record import Case

DIM = 20
UNITS = 4
SIZES = (100, 1_000, 10_000, 100_000)
TRAINING = (100, 1_000)
"""Nodes that train at the same time, beside the 20 of most runs."""
WIDE = 10_000
"""Nodes of the fleets in which more than 20 train at the same time."""
LEAST_REPLIES = 1_000
LEAST_ROUNDS = 5
"""What is measured, at least, once all nodes are known."""
PHASE: dict[str, Any] = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}


class AllFirst(FedAvg):
    """FedAvg whose first round has all nodes, so that all are known after it."""

    def __init__(self, share: float, evaluates: bool) -> None:
        super().__init__(fraction_train=share, fraction_evaluate=float(evaluates))
        self.share = share

    def configure_train(self, server_round: int, *rest: Any) -> Iterable[Message]:
        """Draw the nodes of a round."""
        self.fraction_train = 1.0 if server_round == 1 else self.share
        return super().configure_train(server_round, *rest)


class Size(NamedTuple):
    """A fleet, and how many of its nodes train at the same time."""

    nodes: int
    training: int
    evaluates: bool
    """Whether all nodes evaluate each model."""

    def fedavg(self) -> FedAvg:
        return AllFirst(self.training / self.nodes, self.evaluates)

    def plain(self) -> FedAvg:
        return FedAvg(fraction_evaluate=float(self.evaluates))


STRATEGIES: dict[str, Callable[[Size, Path], Strategy]] = {
    "FedAvg": lambda size, folder: size.fedavg(),
    "FedSlice": lambda size, folder: FedSlice(size.plain(), concurrency=size.training),
    "FedBuff": lambda size, folder: FedBuff(size.plain(), buffer_size=5, concurrency=size.training),
    "TiFL": lambda size, folder: TiFL(size.plain(), size.training, **PHASE),
    "BiasedLocalSGD": lambda size, folder: BiasedLocalSGD(size.fedavg(), fast_steps=8),
    "CDGraB": lambda size, folder: CDGraB(size.fedavg(), sketch_size=16),
    "Compressed": lambda size, folder: Compressed(size.fedavg()),
    "Recorded": lambda size, folder: Recorded(size.fedavg(), run_dir=folder / "run"),
}
ASYNCHRONOUS = ("FedSlice", "FedBuff")


def plan(options: Options) -> Iterator[Trial]:
    fleets = [("emulated", name, nodes, 20) for name in STRATEGIES for nodes in SIZES]
    fleets += [("emulated", name, WIDE, training) for name in STRATEGIES for training in TRAINING]
    some = ("FedAvg", "FedSlice", "FedBuff", "BiasedLocalSGD")
    fleets += [("real", name, nodes, 20) for name in some for nodes in SIZES[:3]]
    fleets += [("all evaluate", name, nodes, 20) for name in some for nodes in SIZES[:2]]
    for kind, strategy, nodes, training in fleets:
        case = {"experiment": "scale", "name": f"{strategy}, {training} of {nodes} nodes, {kind}"}
        case |= {"kind": kind, "strategy": strategy, "nodes": nodes, "training": training}
        yield Trial(case, alone=True)


class EchoFleet:
    """What the nodes do: a step towards a goal, and orders of four units."""

    def __init__(self) -> None:
        self.samplers: dict[int, OrderedSampler] = {}
        self.app = ClientApp(mods=[hetero])
        self.app.train()(self.train)
        self.app.train("profile")(self.report)
        self.app.evaluate()(self.report)

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


class ReadyGrid(Grid):
    """Real nodes, as far as a strategy can see, which reply at once."""

    def __init__(self, app: ClientApp, num_nodes: int, meter: Meter) -> None:
        self.app = app
        self.meter = meter
        self.nodes = {1_000 + i: NodeInfo(node_id=1_000 + i, name=str(i)) for i in range(num_nodes)}
        self.local = LocalGrid(app, named_fleet("paper-5", 1))
        self.replies: dict[str, Message] = {}
        self.numbers = count()

    @property
    def run(self) -> Any:
        return self.local.run

    def set_run(self, run: Any) -> None:
        self.local.set_run(run)

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self.local.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        listed = list(messages)
        self.meter.replies += len(listed)
        with self.meter.apart():
            return [self._answer(message) for message in listed]

    def _answer(self, message: Message) -> str:
        message_id = f"{next(self.numbers)}"
        set_message_id(message, message_id)
        node_id = message.metadata.dst_node_id
        config = {keys.PARTITION_ID: node_id - 1_000}
        context = Context(1, node_id, config, RecordDict(), {})
        self.replies[message_id] = self.app(message, context)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self.meter.apart():
            return [self.replies.pop(i) for i in message_ids if i in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


class Mark(NamedTuple):
    """What was spent until the end of a round."""

    round: int
    server_s: float
    replies: int


def run(case: Case, data: Data) -> dict[str, Any]:
    """Run a fleet until all nodes are known, and then for some rounds."""
    random.seed(0)
    size = Size(case["nodes"], case["training"], case["kind"] == "all evaluate")
    meter = Meter()
    nodes = EchoFleet()
    made = ReadyGrid if case["kind"] == "real" else TimedGrid
    grid: Grid = made(nodes.app, size.nodes, meter)
    marks: list[Mark] = []

    def is_over(first: Mark, last: Mark) -> bool:
        enough = last.replies - first.replies >= max(LEAST_REPLIES, 2 * size.training)
        return enough and last.round - first.round >= LEAST_ROUNDS

    def note(number: int, arrays: ArrayRecord) -> None:
        mark = Mark(number, meter.server_s, meter.replies)
        is_asynchronous = case["strategy"] in ASYNCHRONOUS
        if number >= 1 and (mark.replies >= size.nodes or not is_asynchronous):
            marks.append(mark)
            if is_over(marks[0], mark):
                raise Enough

    with tempfile.TemporaryDirectory() as folder, only_errors():
        strategy = STRATEGIES[case["strategy"]](size, Path(folder))
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
