"""What the size of a model costs the server: peak memory, and CPU time a parameter and reply.

The nodes do no work. Their replies get a model when the server collects them, so that each reply
holds a copy of its own, as replies from a real fleet do. Peak memory is resident memory of the
whole process (VmHWM), less what was resident before the run. Unlike tracemalloc's, it includes what
the allocator does not give back, and unlike ``ru_maxrss`` it begins anew in each process. CPU time
is that of the process without the nodes' part.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.compression import wire
from flwr_hetero.exchange.nodes import TranslatingGrid
from flwr_hetero.records import arrays_in, configs_in
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    Compressed,
    FedBuff,
    FedSlice,
    Recorded,
    TiFL,
)
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.cost.scale import EchoFleet, Meter, TimedGrid

ROUNDS = {"FedBuff": 6}
"""By strategy: its rounds, 3 unless given. A server update of FedBuff has half of the nodes."""
MILLION = 1_000_000
SIZES = ((1, 8), (10, 8), (100, 8), (300, 4))
"""Millions of parameters, and nodes in training."""
LARGEST_SHARE, NUM_OTHERS = 4, 48
"""A quarter of the parameters is in one array, as in an embedding; the rest in equal ones."""


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


STRATEGIES: dict[str, Callable[[int, str], Strategy]] = {
    "FedAvg": lambda nodes, folder: fedavg(),
    "FedSlice": lambda nodes, folder: FedSlice(fedavg()),
    "FedBuff": lambda nodes, folder: FedBuff(fedavg()),
    "TiFL": lambda nodes, folder: TiFL(fedavg(), nodes, 1),
    "BiasedLocalSGD": lambda nodes, folder: BiasedLocalSGD(fedavg()),
    "CDGraB": lambda nodes, folder: CDGraB(fedavg()),
    "Compressed": lambda nodes, folder: Compressed(fedavg()),
    "Recorded": lambda nodes, folder: Recorded(fedavg(), run_dir=folder),
}


def plan(options: Options) -> Iterator[Trial]:
    for millions, nodes in SIZES:
        for strategy in STRATEGIES:
            case = {"experiment": "models", "name": f"{strategy}, {millions} million parameters"}
            case |= {"strategy": strategy, "parameters": millions * MILLION, "nodes": nodes}
            yield Trial(case, alone=True)


def make_model(parameters: int, seed: int) -> ArrayRecord:
    """Make random arrays of float32, one after the other."""
    rng = np.random.default_rng(seed)
    largest = parameters // LARGEST_SHARE
    model = ArrayRecord()
    for place in range(NUM_OTHERS + 1):
        size = (parameters - largest) // NUM_OTHERS if place else largest
        model[f"layer{place}.weight"] = Array(rng.standard_normal(size, np.float32))
    return model


class ModelsOnArrival(TranslatingGrid):
    """Send small messages to the nodes of a grid, and put a model into each of their replies."""

    def __init__(self, grid: Grid, models: list[ArrayRecord]) -> None:
        super().__init__(grid)
        self.models = cycle(models)
        self.num_replies = 0
        self.cpu_s = 0.0

    def write(self, message: Message) -> Message:
        content = RecordDict({**message.content})
        for name in arrays_in(content):
            content[name] = EchoFleet.first()
        return Message(content, metadata=message.metadata)  # type: ignore[call-overload,no-any-return]

    def read(self, reply: Message) -> Message:
        start_s = time.process_time()
        if reply.metadata.message_type == MessageType.TRAIN:
            self.num_replies += 1
            arrays = ArrayRecord()
            for name, array in next(self.models).items():
                # The bytes of each reply are a copy.
                data = bytes(bytearray(array.data))
                arrays[name] = Array(array.dtype, array.shape, array.stype, data)
            reply.content["arrays"] = arrays
        self.cpu_s += time.process_time() - start_s
        return reply


class PackedOnArrival(ModelsOnArrival):
    """Do the same for nodes with the mod of :class:`Compressed`, which send packed updates."""

    def write(self, message: Message) -> Message:
        self.asked = configs_in(message.content)[keys.COMPRESSION]
        return super().write(message)

    def read(self, reply: Message) -> Message:
        reply = super().read(reply)
        reply.content[keys.COMPRESSION] = self.asked
        return reply


def status_bytes(name: str) -> int:
    """Return an entry of the process's memory in Linux, such as VmRSS."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run(case: Case, data: Data) -> dict[str, Any]:
    """Run a method on ready-made replies; memory is in copies of the model."""
    random.seed(0)
    nodes = EchoFleet()
    meter = Meter()
    local = TimedGrid(nodes.app, case["nodes"], meter)
    models = [make_model(case["parameters"], seed) for seed in (1, 2)]
    grid = ModelsOnArrival(local, models)
    if case["strategy"] == "Compressed":
        grid = PackedOnArrival(local, [wire.packed(model, 4) for model in models])
    del models
    with tempfile.TemporaryDirectory() as folder:
        strategy = STRATEGIES[case["strategy"]](case["nodes"], folder)
        # This sets the peak to what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = status_bytes("VmRSS")
        first = make_model(case["parameters"], 0)
        start_s = meter.server_s
        strategy.start(grid, first, ROUNDS.get(case["strategy"], 3))
        cpu_s = meter.server_s - start_s - grid.cpu_s
    model_bytes = 4 * case["parameters"]
    return {
        "copies": (status_bytes("VmHWM") - before) / model_bytes,
        "ns": 1e9 * cpu_s / case["parameters"] / grid.num_replies,
        "replies": grid.num_replies,
    }
