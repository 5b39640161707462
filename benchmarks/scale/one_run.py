"""One fleet, one nest: CPU time and memory per round on a LocalGrid; prints a json line.

Usage: ``python benchmarks/scale/one_run.py NEST NODES ROUNDS COHORT [--profile]``. COHORT nodes
train each round; 0: all of them. ``--profile`` prints where the time goes instead.
"""

import argparse
import cProfile
import json
import logging
import os
import pstats
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import sketch
from flwr_hetero.cd_grab.node_order import ServedWalk
from flwr_hetero.cd_grab.wire import read_answer, read_terms, write_report
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.mod import timing
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, TiFL

DIM, UNITS = 20, 4
NESTS = {
    "FedAvg": lambda cohort, share: FedAvg(fraction_train=share, fraction_evaluate=0.0),
    "TiFL": lambda cohort, share: TiFL(quiet(), cohort, sync_rounds=1, warmup_rounds=0),
    "BiasedLocalSGD(CDGraB)": lambda cohort, share: BiasedLocalSGD(orders(), fast_steps=8),
    "TiFL(BiasedLocalSGD(CDGraB))": lambda cohort, share: TiFL(
        BiasedLocalSGD(orders(), fast_steps=8), cohort, sync_rounds=1, warmup_rounds=0
    ),
}


def quiet() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def orders() -> CDGraB:
    return CDGraB(quiet(), sketch_size=16)


class Nodes:
    """What the nodes do: a step towards a goal, and orders of four units; its time is counted."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.walks: dict[int, ServedWalk] = {}
        self.app = ClientApp(mods=[timing])
        self.app.train()(self.train)
        self.app.train("profile")(self.report)
        self.app.evaluate()(self.report)

    def report(self, message: Message, context: Context) -> Message:
        """Answer without a model."""
        metrics = MetricRecord({"num-examples": 10, "acc": random.random()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Take a step, and visit the units in the order that is wanted."""
        start_s = time.process_time()
        partition = int(context.node_config["partition-id"])
        w = message.content["arrays"]["w"].numpy()
        metrics = {"num-examples": 10, "train-loss": float(np.mean((w - partition) ** 2))}
        new = ArrayRecord({"w": Array((w + 0.1 * (partition - w)).astype(np.float32))})
        content = RecordDict({"arrays": new, "metrics": MetricRecord(metrics)})
        if order := message.content.config_records.get(keys.ORDER):
            content[keys.ORDER] = ConfigRecord(self.walk(order, partition))
        self.cpu_s += time.process_time() - start_s
        return Message(content, reply_to=message)

    def walk(self, order: ConfigRecord, partition: int) -> dict:
        """Visit all units once and report on them."""
        terms = read_terms(order)
        walk = self.walks.setdefault(partition, ServedWalk(UNITS))
        walk.follow(read_answer(order, UNITS))
        gradients = np.random.default_rng(partition).standard_normal((UNITS, DIM), np.float32)
        visited = walk.take(UNITS)
        for unit in visited:
            if walk.watching:
                walk.see(sketch(gradients[[unit]], terms.sketch_size, terms.sketch_seed))
        return write_report(terms, UNITS, walk.report())


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(nest: str, num_nodes: int, num_rounds: int, cohort: int) -> dict:
    random.seed(0)
    before_mb = resident_mb()
    nodes = Nodes()
    start_s = time.process_time()
    grid = LocalGrid(nodes.app, named_fleet("paper-5", num_nodes))
    grid_s, grid_mb = time.process_time() - start_s, resident_mb()
    strategy: Strategy = NESTS[nest](cohort, (cohort or num_nodes) / num_nodes)
    marks = []

    def mark(server_round: int, arrays: ArrayRecord) -> None:
        marks.append((time.process_time(), nodes.cpu_s, resident_mb()))

    start_s = time.process_time()
    arrays = ArrayRecord({"w": Array(np.zeros(DIM, np.float32))})
    strategy.start(grid, arrays, num_rounds, evaluate_fn=mark)
    cpu_s, node_s, mb = (np.array(column) for column in zip(*marks, strict=True))
    own_s = np.diff(cpu_s) - np.diff(node_s)  # per round, the nodes' own work taken off
    return {
        "nest": nest,
        "nodes": num_nodes,
        "rounds": num_rounds,
        "cohort": cohort or num_nodes,
        "grid_s": grid_s,
        "start_s": cpu_s[0] - start_s,
        "round_s": float(np.median(own_s)),
        "round_s_least": float(own_s.min()),
        "round_s_most": float(own_s.max()),
        "first_half_s": float(np.median(own_s[: max(1, len(own_s) // 2)])),
        "second_half_s": float(np.median(own_s[len(own_s) // 2 :])),
        "node_s": float(np.median(np.diff(node_s))),
        "grid_mb": grid_mb - before_mb,
        "run_mb": float(mb[-1] - grid_mb),
        "mb_per_round": float((mb[-1] - mb[1]) / max(1, num_rounds - 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("nest", choices=NESTS)
    parser.add_argument("nodes", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("cohort", type=int)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.profile:
        profiler = cProfile.Profile()
        profiler.runcall(run, args.nest, args.nodes, args.rounds, args.cohort)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    else:
        print(json.dumps(run(args.nest, args.nodes, args.rounds, args.cohort)))


if __name__ == "__main__":
    main()
