"""CPU time and memory per round of LocalGrid and strategies at 100, 1,000 and 10,000 nodes.

The model is a vector of 20 numbers, so that the figures show what the package itself costs.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.mod import timing
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedBuff, TiFL
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case

DIM = 20
UNITS = 4
COHORT = 50
ALL_ROUNDS = 3
SIZES = (100, 1000, 10_000)
SELECTED = ("FedAvg", "FedBuff", "TiFL", "TiFL(BiasedLocalSGD(CDGraB))")
EVERYBODY = ("FedAvg", "BiasedLocalSGD(CDGraB)")
PHASE: dict[str, Any] = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}


def fedavg(share: float = 1.0) -> FedAvg:
    return FedAvg(fraction_train=share, fraction_evaluate=0.0)


def stepped() -> BiasedLocalSGD:
    return BiasedLocalSGD(CDGraB(fedavg(), sketch_size=16), fast_steps=8)


STRATEGIES: dict[str, Callable[[int, float], Strategy]] = {
    "FedAvg": lambda cohort, share: fedavg(share),
    "FedBuff": lambda cohort, share: FedBuff(fedavg(), buffer_size=cohort),
    "TiFL": lambda cohort, share: TiFL(fedavg(), cohort, **PHASE),
    "BiasedLocalSGD(CDGraB)": lambda cohort, share: stepped(),
    "TiFL(BiasedLocalSGD(CDGraB))": lambda cohort, share: TiFL(stepped(), cohort, **PHASE),
}


def plan(options: Options) -> Iterator[Trial]:
    jobs = [(name, COHORT, options.settings["rounds"]) for name in SELECTED]
    jobs += [(name, 0, ALL_ROUNDS) for name in EVERYBODY]
    for nodes, (strategy, cohort, number) in product(SIZES, jobs):
        name = f"{strategy}, {cohort or 'all'} of {nodes} nodes"
        case = {"experiment": "scale", "name": name, "strategy": strategy, "nodes": nodes}
        yield Trial(case | {"rounds": number, "cohort": cohort or nodes}, alone=True)


class EchoFleet:
    """What the nodes do: a step towards a goal, and orders of four units. It times this work."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.samplers: dict[int, OrderedSampler] = {}
        self.app = ClientApp(mods=[timing])
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
        start_s = time.process_time()
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
        self.cpu_s += time.process_time() - start_s
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


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(case: Case, data: Data) -> dict[str, Any]:
    """Run a fleet, and subtract the nodes' own work from the time of a round."""
    random.seed(0)
    # Memory of Python and torch is no cost of the fleet.
    before_mb = resident_mb()
    nodes = EchoFleet()
    grid = LocalGrid(nodes.app, named_fleet("paper-5", case["nodes"]))
    grid_mb = resident_mb()
    strategy = STRATEGIES[case["strategy"]](case["cohort"], case["cohort"] / case["nodes"])
    marks: list[tuple[float, float, float]] = []

    def mark(*_: Any) -> None:
        marks.append((time.process_time(), nodes.cpu_s, resident_mb()))

    start_s = time.process_time()
    strategy.start(grid, nodes.first(), case["rounds"], evaluate_fn=mark)
    cpu_s, node_s, mb = (np.array(column) for column in zip(*marks, strict=True))
    # Server and nodes are one process here.
    own_s = np.diff(cpu_s) - np.diff(node_s)
    # Both halves are reported, because late rounds must not cost more than early ones.
    half = len(own_s) // 2
    found = {
        "round_s": np.median(own_s),
        "round_s_least": own_s.min(),
        "round_s_most": own_s.max(),
        "first_half_s": np.median(own_s[:half]),
        "second_half_s": np.median(own_s[half:]),
        "start_s": cpu_s[0] - start_s,
        "grid_mb": grid_mb - before_mb,
        "run_mb": mb[-1] - grid_mb,
        "mb_per_round": (mb[-1] - mb[1]) / max(1, case["rounds"] - 1),
    }
    return {name: float(value) for name, value in found.items()}
