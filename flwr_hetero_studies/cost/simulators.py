"""Replies a second and CPU time per reply of LocalGrid and of Flower's simulation engine in Ray.

Both run the same ClientApp with Flower's own FedAvg. All nodes train in every round, and there is
no evaluation. Ray has a process for each of two cores.
"""

import os
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError, Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.real.throttle import cpu_time_s, descendants

CORES = 2
NODES = 50
ENGINES = ("LocalGrid", "Ray")
ROUNDS = {"empty": 40, "softmax": 20, "cnn": 8}
"""Rounds by job: the empty one returns its model of 20 numbers, the others train on digits."""
STEPS = {"softmax": 5, "cnn": 20}
BATCH = 16
SHAPE: Any = ((1, 8, 8), 10)


def plan(options: Options) -> Iterator[Trial]:
    for job, engine in product(ROUNDS, ENGINES):
        case = {"experiment": "simulators", "name": f"{job}, {engine}", "engine": engine}
        rounds = 2 if options.fast else ROUNDS[job]
        yield Trial(case | {"job": job, "nodes": NODES, "rounds": rounds}, alone=True)


def first_model(job: str) -> ArrayRecord:
    if job == "empty":
        return ArrayRecord({"w": Array(np.zeros(20, np.float32))})
    return ArrayRecord(tasks.make_model(job, *SHAPE).state_dict())


@lru_cache(maxsize=1)
def digits() -> tasks.Examples:
    return tasks.load_partition(DIGITS, 0, 1)


def fit(arrays: ArrayRecord, job: str, partition: int) -> ArrayRecord:
    """Train a model on some digits."""
    torch.set_num_threads(1)
    model = tasks.model_from(arrays.to_torch_state_dict(), job, *SHAPE)
    examples = digits()
    order = np.random.default_rng(partition).permutation(len(examples))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS[job]):
        inputs, targets = examples.take(order[step * BATCH : (step + 1) * BATCH])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return ArrayRecord(model.state_dict())


def app_for(job: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays: Any = message.content["arrays"]
        if job != "empty":
            arrays = fit(arrays, job, int(context.node_config[keys.PARTITION_ID]))
        metrics = MetricRecord({keys.NUM_EXAMPLES: BATCH})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def measure(grid: Grid, case: Case) -> dict[str, float]:
    """Run FedAvg; return the figures of all rounds but the first, in which workers start."""
    marks: list[tuple[float, float]] = []

    def mark(*_: Any) -> None:
        cpu_s = time.process_time() + sum(map(cpu_time_s, descendants(os.getpid())))
        marks.append((time.perf_counter(), cpu_s))

    fedavg = FedAvg(fraction_evaluate=0.0)
    fedavg.start(grid, first_model(case["job"]), case["rounds"] + 1, evaluate_fn=mark)
    wall_s, cpu_s = np.subtract(marks[-1], marks[1])
    replies = case["nodes"] * case["rounds"]
    return {"replies_per_s": float(replies / wall_s), "cpu_ms": float(1e3 * cpu_s / replies)}


def run(case: Case, data: Data) -> dict[str, float]:
    app = app_for(case["job"])
    if case["engine"] == "LocalGrid":
        profiles = named_fleet("uniform", case["nodes"])
        return measure(LocalGrid(app, profiles), case)
    if find_spec("ray") is None:
        raise NotHereError("ray is not installed")
    from flwr.simulation import run_simulation

    server = ServerApp()
    found: dict[str, float] = {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.update(measure(grid, case))

    init = {"num_cpus": CORES, "log_to_driver": False, "logging_level": "error"}
    backend: Any = {"init_args": init, "client_resources": {"num_cpus": 1}}
    run_simulation(server, app, case["nodes"], backend_config=backend)
    if not found:
        raise RuntimeError(f"{case['name']}: the ServerApp has failed")
    return found
