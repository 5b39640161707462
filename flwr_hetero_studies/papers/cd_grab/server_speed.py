"""How fast the order server is, against the memory it reads: one thread.

Per pair the greedy rule takes a dot product and an addition of two vectors of d numbers. Two
limits are stated: the time to read a pair's two gradients once (8 d bytes: what a server needs
that gets gradients, as in the paper) and to read its difference once (4 d bytes: what ours gets).
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from flwr_hetero.cd_grab.algorithm import pair_balance
from flwr_hetero.cd_grab.order_server import OrderServer
from flwr_hetero.cd_grab.wire import Report
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case

NODES = 4


def plan(options: Options) -> Iterator[Trial]:
    """Yield all runs, each alone."""
    repeats = {"repeats": 1 if options.fast else 7}
    for dim, pairs in ((100_000, 256), (1_000_000, 48)):
        case = {"experiment": "pair balance", "name": f"d = {dim:,}", "dim": dim, "pairs": pairs}
        yield Trial(case | repeats, alone=True)
    for dim, nodes, pairs in ((1024, 8, 128), (1024, 100, 128), (1_000_000, 4, 1)):
        case = {"experiment": "server round", "name": f"d = {dim:,}, {nodes} nodes", "dim": dim}
        yield Trial(case | {"nodes": nodes, "pairs": pairs} | repeats, alone=True)


def run(case: Case) -> dict[str, Any]:
    measure = balance_speed if case["experiment"] == "pair balance" else round_speed
    return {"metrics": measure(case)}


def seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time calls in turns, so that whatever else the machine does is in all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: sorted(each) for name, each in times.items()}


def median(times: list[float]) -> float:
    return times[len(times) // 2]


def numpy_loop(diffs: np.ndarray) -> None:
    total = np.zeros(diffs.shape[1], np.float32)
    for diff in diffs:
        total += (1 if total @ diff <= 0 else -1) * diff


def torch_loop(diffs: torch.Tensor) -> None:
    total = torch.zeros(diffs.shape[1])
    for diff in diffs:
        total.add_(diff, alpha=1 if float(torch.dot(total, diff)) <= 0 else -1)


def ours(diffs: np.ndarray) -> None:
    total = np.zeros(diffs.shape[1], np.float32)
    for step in diffs.reshape(-1, NODES, diffs.shape[1]):
        total, _ = pair_balance(total, step)


def extra_vectors(call: Callable[[], object], dim: int) -> float:
    """Return the peak of memory taken during a call, in vectors of ``dim`` float32."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (4 * dim)


def balance_speed(case: Case) -> dict[str, float]:
    """Time ours, a NumPy loop and a torch loop beside the read of 200 MB."""
    dim, pairs = case["dim"], case["pairs"]
    diffs = np.random.default_rng(0).standard_normal((pairs, dim), dtype=np.float32)
    tensors, memory = torch.from_numpy(diffs), np.ones(50_000_000, np.float32)
    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: memory.sum(),
        "dot": lambda: memory @ memory,
        "ours": lambda: ours(diffs),
        "numpy": lambda: numpy_loop(diffs),
        "torch": lambda: torch_loop(tensors),
    }
    times = seconds(ways, case["repeats"])
    bandwidth = memory.nbytes / min(median(times["sum"]), median(times["dot"]))
    figures = {"read_gb_per_s": round(bandwidth / 1e9, 2)}
    for name in ("ours", "numpy", "torch"):
        figures[f"{name}_pairs_per_s"] = round(pairs / median(times[name]))
        figures[f"{name}_spread"] = round(times[name][-1] / times[name][0], 2)
    per_pair = pairs / median(times["ours"]) / bandwidth
    figures["of_reading_two_gradients"] = round(8 * dim * per_pair, 3)
    figures["of_reading_the_difference"] = round(4 * dim * per_pair, 3)
    return figures | {"extra_vectors": round(extra_vectors(ways["ours"], dim), 2)}


def round_speed(case: Case) -> dict[str, float]:
    """Time one round of the whole server: reports in, orders out."""
    dim, nodes, pairs = case["dim"], case["nodes"], case["pairs"]
    rng = np.random.default_rng(0)
    diffs = rng.standard_normal((nodes, pairs, dim), dtype=np.float32)

    def receive() -> None:
        server = OrderServer(exact=dim > 1024)
        server.receive({f"node-{i}": Report(0, 2 * pairs, 0, d) for i, d in enumerate(diffs)})

    taken = median(seconds({"round": receive}, case["repeats"])["round"])
    figures = {"pairs_per_s": round(nodes * pairs / taken), "seconds": round(taken, 4)}
    return figures | {"extra_vectors": round(extra_vectors(receive, dim), 1)}
