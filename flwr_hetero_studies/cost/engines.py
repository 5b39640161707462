"""CPU time and memory per reply of Flower's simulation in Ray, and of LocalGrid, with FedSlice."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.fleet.throttle import cpu_time_s, descendants
from flwr_hetero.mod import hetero
from flwr_hetero.server.nodes import TranslatingGrid
from flwr_hetero.strategy import FedSlice
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.cost.scale import EchoFleet, fedavg, resident_mb

RAY, LOCAL = "Ray", "LocalGrid"
WORKERS, FEW = 2, 100
"""Ray's processes for ClientApps, and nodes where the speeds of both are compared."""
MORE_ROUNDS = 5
"""Times as many rounds there: a round has fewer replies."""
STEPS, BATCH, EXAMPLES = 20, 16, 160
MODEL, SHAPE = "cnn", ((1, 8, 8), 10)
QUIET_S = 60.0
"""Seconds without a reply after which what is still in flight is lost."""
Job = Callable[[Message, Context], tuple[ArrayRecord, float]]
WORK = "work-s"
"""Metric of a reply: the CPU seconds of the app's own function."""


def plan(nodes: int, rounds: int) -> Iterator[Trial]:
    jobs = [("ray", "empty", nodes, rounds)]
    jobs += [("speed", job, FEW, rounds * MORE_ROUNDS) for job in JOBS]
    for (experiment, job, number, count), engine in product(jobs, (RAY, LOCAL)):
        name = f"{job} job, {number} nodes, {engine}"
        case = {"experiment": experiment, "name": name, "engine": engine, "job": job}
        yield Trial(case | {"nodes": number, "rounds": count}, alone=True)


# --- nodes ------------------------------------------------------------------------------------
def echo(message: Message, context: Context) -> tuple[ArrayRecord, float]:
    """Take steps towards a goal."""
    goal = int(context.node_config[keys.PARTITION_ID]) % 10
    w = message.content.array_records["arrays"]["w"].numpy()
    for _ in range(hetero.num_steps(message, default=STEPS, batch_size=BATCH) or STEPS):
        w = w + 0.1 * (goal - w)
    return ArrayRecord({"w": Array(w.astype(np.float32))}), float(np.mean((w - goal) ** 2))


@lru_cache(maxsize=1)
def digits() -> tasks.Examples:
    return tasks.load_partition(DIGITS, 0, 1)


def fit(message: Message, context: Context) -> tuple[ArrayRecord, float]:
    """Train a small network on some digits."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(int(context.node_config[keys.PARTITION_ID]))
    examples = digits()
    inputs, targets = examples.take(rng.permutation(len(examples))[:EXAMPLES])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)
    state = message.content.array_records["arrays"].to_torch_state_dict()
    model = tasks.model_from(state, MODEL, *SHAPE)
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 0.0
    for x, y in hetero.batches(loader, message):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total = float(loss.detach())
    return ArrayRecord(model.state_dict()), total


JOBS: dict[str, Job] = {"empty": echo, "torch": fit}


def first(job: str) -> ArrayRecord:
    if job == "torch":
        return ArrayRecord(tasks.make_model(MODEL, *SHAPE).state_dict())
    return EchoFleet.first()


def nodes_app(job: str) -> ClientApp:
    app = ClientApp(mods=[hetero])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        start_s = time.thread_time()
        arrays, loss = JOBS[job](message, context)
        metrics = MetricRecord({"train-loss": loss, keys.NUM_EXAMPLES: EXAMPLES})
        metrics[WORK] = time.thread_time() - start_s
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    return app


# --- server -----------------------------------------------------------------------------------
class CountingGrid(TranslatingGrid):
    """Count messages and replies."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.open, self.nodes = set[str](), set[int]()
        self.replies, self.errors, self.work_s = 0, 0, 0.0

    def write(self, message: Message) -> Message:
        return message

    def sent(self, message: Message, written: Message) -> None:
        self.open.add(message.metadata.message_id)

    def read(self, reply: Message) -> Message:
        self.open.discard(reply.metadata.reply_to_message_id)
        if reply.has_error():
            self.errors += 1
        else:
            self.replies += 1
            self.nodes.add(reply.metadata.src_node_id)
            metrics: Any = reply.content["metrics"]
            self.work_s += metrics[WORK]
        return reply

    def drain(self) -> None:
        """Wait for what is in flight."""
        # in virtual time, until the last message ends
        if isinstance(self.grid, LocalGrid):
            self.wait_for(set(self.open))
        quiet_s = time.monotonic() + QUIET_S
        while self.open and time.monotonic() < quiet_s:
            if list(self.pull_messages(set(self.open))):
                quiet_s = time.monotonic() + QUIET_S
            time.sleep(0.2)


def threads_s() -> dict[str, float]:
    """Return the CPU seconds of this process's threads that Python knows, by function or name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        # Linux's number of a thread's clock
        clock = ~(thread.native_id or 0) << 3 | 6
        name = thread.name.rpartition("(")[2].rstrip(")")
        found[name] = found.get(name, 0.0) + time.clock_gettime(clock)
    return found


def figures(grid: CountingGrid) -> dict[str, float]:
    return {"wall_s": time.monotonic(), "server_s": time.thread_time(), "work_s": grid.work_s,
            "process_s": time.process_time(), "replies": grid.replies, "mb": resident_mb(),
            "below_s": sum(map(cpu_time_s, descendants(os.getpid()))),
            "queue_s": threads_s().get("add_messages_to_queue", 0.0)}  # fmt: skip


def measure(inner: Grid, case: Case) -> dict[str, float]:
    """Run FedSlice; return what a reply costs after the first round, in CPU milliseconds."""
    grid, marks = CountingGrid(inner), list[dict[str, float]]()

    def mark(*_: Any) -> None:
        marks.append(figures(grid))

    # without a selection: all nodes are in flight
    FedSlice(fedavg()).start(grid, first(case["job"]), case["rounds"], evaluate_fn=mark)
    _, begun, *_, end = marks
    grid.drain()
    spent = {name: end[name] - begun[name] for name in end}
    local = case["engine"] == LOCAL
    # LocalGrid's nodes work in the server's thread, Ray's in processes below
    server_s = spent["server_s"] - (spent["work_s"] if local else 0.0)
    costs = {"work": spent["work_s"], "server": server_s, "queue": spent["queue_s"]}
    costs["rest"] = costs["workers"] = 0.0
    if not local:
        costs["rest"] = spent["process_s"] - spent["server_s"] - spent["queue_s"]
        costs["workers"] = spent["below_s"] - spent["work_s"]
    found = {f"{name}_ms": 1e3 * cost_s / spent["replies"] for name, cost_s in costs.items()}
    found |= {"replies": grid.replies, "lost": len(grid.open) + grid.errors}
    found |= {"nodes": len(grid.nodes), "per_s": spent["replies"] / spent["wall_s"]}
    return found | {"mb": begun["mb"], "more_mb": spent["mb"]}


def run(case: Case, data: Data) -> dict[str, float]:
    app, nodes = nodes_app(case["job"]), case["nodes"]
    if case["engine"] == LOCAL:
        return rounded(measure(LocalGrid(app, named_fleet("uniform", nodes)), case))
    if find_spec("ray") is None:
        raise NotHereError("ray is not installed")
    from flwr.simulation import run_simulation

    server, found = ServerApp(), dict[str, float]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.update(measure(grid, case))

    init = {"num_cpus": WORKERS, "log_to_driver": False, "logging_level": "error"}
    resources = {"init_args": init, "client_resources": {"num_cpus": 1}}
    run_simulation(server, app, nodes, backend_config=resources)  # type: ignore[arg-type]
    if not found:
        raise RuntimeError(f"{case['name']}: the ServerApp has failed")
    return rounded(found)


def rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found.items()}
