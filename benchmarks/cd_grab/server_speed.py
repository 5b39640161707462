"""How fast the order server is, against the memory it reads: one thread, everything in one run.

Per pair the greedy rule takes a dot product and an addition of two vectors of d numbers. Two
limits are stated: the time to read a pair's two gradients once (8 d bytes: what a server needs
that gets gradients, as in the paper) and to read its difference once (4 d bytes: what ours gets).
Usage, from the top folder, on a quiet machine:
``OMP_NUM_THREADS=1 python -m benchmarks.cd_grab.server_speed [--repeats 7]``; writes
``server_speed.jsonl``.
"""

import argparse
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from flwr_hetero.cd_grab.algorithm import pair_balance
from flwr_hetero.cd_grab.order_server import OrderServer, Report

HERE = Path(__file__).parent
NODES = 4


def seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time calls in turn, so that whatever else the machine does hits all of them alike."""
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
    """Peak of memory taken during a call, in vectors of ``dim`` float32."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (4 * dim)


def balance_speed(dim: int, num_pairs: int, repeats: int) -> dict:
    diffs = np.random.default_rng(0).standard_normal((num_pairs, dim), dtype=np.float32)
    tensors, memory = torch.from_numpy(diffs), np.ones(50_000_000, np.float32)
    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: memory.sum(),
        "dot": lambda: memory @ memory,
        "ours": lambda: ours(diffs),
        "numpy": lambda: numpy_loop(diffs),
        "torch": lambda: torch_loop(tensors),
    }
    times = seconds(ways, repeats)
    bandwidth = memory.nbytes / min(median(times["sum"]), median(times["dot"]))
    line: dict = {"what": "pair_balance", "dim": dim, "read-gb-per-s": round(bandwidth / 1e9, 2)}
    for name in ("ours", "numpy", "torch"):
        line[f"{name}-pairs-per-s"] = round(num_pairs / median(times[name]))
        line[f"{name}-spread"] = round(times[name][-1] / times[name][0], 2)
    per_pair = num_pairs / median(times["ours"]) / bandwidth
    line["of-reading-two-gradients"] = round(8 * dim * per_pair, 3)
    line["of-reading-the-difference"] = round(4 * dim * per_pair, 3)
    line["extra-vectors"] = round(extra_vectors(ways["ours"], dim), 2)
    return line


def round_speed(dim: int, nodes: int, num_pairs: int, exact: bool, repeats: int) -> dict:
    """One round of the whole server: reports in, orders out."""
    rng = np.random.default_rng(0)
    diffs = rng.standard_normal((nodes, num_pairs, dim), dtype=np.float32)

    def receive() -> None:
        server = OrderServer(exact=exact)
        reports = (Report(f"node-{i}", 0, 2 * num_pairs, 0, d) for i, d in enumerate(diffs))
        server.receive(reports)

    taken = median(seconds({"round": receive}, repeats)["round"])
    return {
        "what": "a round of the order server",
        "dim": dim,
        "nodes": nodes,
        "pairs-per-node": num_pairs,
        "exact": exact,
        "pairs-per-s": round(nodes * num_pairs / taken),
        "seconds": round(taken, 4),
        "extra-vectors": round(extra_vectors(receive, dim), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "server_speed.jsonl")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: figures are for one thread")
    lines = [
        balance_speed(100_000, 256, options.repeats),
        balance_speed(1_000_000, 48, options.repeats),
        round_speed(1024, 8, 128, False, options.repeats),
        round_speed(1024, 100, 128, False, options.repeats),
        round_speed(1_000_000, NODES, 1, True, options.repeats),
    ]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
