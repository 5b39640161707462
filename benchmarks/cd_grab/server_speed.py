"""How fast the order server is, against the memory it reads: one thread, everything in one run.

Per pair the greedy rule takes a dot product and an addition of two vectors of d numbers. Two
limits are stated: the time to read a pair's two gradients once (8 d bytes: what a server needs
that gets gradients, as in the paper) and to read its difference once (4 d bytes: what ours gets).
Usage, from the top folder, on a quiet machine:
``OMP_NUM_THREADS=1 python -m benchmarks.cd_grab.server_speed [--repeats 7]``; writes
``server_speed.jsonl`` and ``server_speed.md``.
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

from flwr_hetero.core.order_book import Report
from flwr_hetero.core.order_server import OrderServer
from flwr_hetero.core.pair_balance import pair_balance

HERE = Path(__file__).parent
NODES = 4


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def read_gb_per_s(repeats: int) -> float:
    """Best of a sum and a dot product with itself over 400 MB."""
    values = np.ones(100_000_000, np.float32)
    ways = (lambda: values.sum(), lambda: values @ values)
    return max(values.nbytes / seconds(way, repeats)[0] / 1e9 for way in ways)


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


def balance_speed(dim: int, num_pairs: int, bandwidth: float, repeats: int) -> dict:
    diffs = np.random.default_rng(0).standard_normal((num_pairs, dim), dtype=np.float32)
    tensors = torch.from_numpy(diffs)
    line: dict = {"what": "pair_balance", "dim": dim, "read-gb-per-s": round(bandwidth, 2)}
    ways = {
        "ours": lambda: ours(diffs),
        "numpy": lambda: numpy_loop(diffs),
        "torch": lambda: torch_loop(tensors),
    }
    for name, call in ways.items():
        times = seconds(call, repeats)
        line[f"{name}-pairs-per-s"] = round(num_pairs / times[0])
        line[f"{name}-spread"] = round(times[len(times) // 2] / times[0], 3)
    per_pair = line["ours-pairs-per-s"] / (bandwidth * 1e9)
    line["of-reading-two-gradients"] = round(8 * dim * per_pair, 3)
    line["of-reading-the-difference"] = round(4 * dim * per_pair, 3)
    line["extra-vectors"] = round(extra_vectors(lambda: ours(diffs), dim), 2)
    return line


def round_speed(dim: int, nodes: int, num_pairs: int, exact: bool, repeats: int) -> dict:
    """One round of the whole server: reports in, orders out."""
    rng = np.random.default_rng(0)
    diffs = rng.standard_normal((nodes, num_pairs, dim), dtype=np.float32)

    def receive() -> None:
        server = OrderServer(exact=exact)
        reports = (Report(f"node-{i}", 0, 2 * num_pairs, 0, d) for i, d in enumerate(diffs))
        server.receive(reports)

    best = seconds(receive, repeats)[0]
    return {
        "what": "a round of the order server",
        "dim": dim,
        "nodes": nodes,
        "pairs-per-node": num_pairs,
        "exact": exact,
        "pairs-per-s": round(nodes * num_pairs / best),
        "seconds": round(best, 4),
        "extra-vectors": round(extra_vectors(receive, dim), 1),
    }


def report(lines: list[dict]) -> str:
    text = [
        "# Order server: speed\n",
        "| numbers per vector d | pairs/s, ours | NumPy | torch | of",
    ]
    text[-1] += " reading two gradients | of reading the difference | extra memory, vectors |"
    text.append("| --- " * 7 + "|")
    for x in (line for line in lines if line["what"] == "pair_balance"):
        text.append(
            f"| {x['dim']:,} | {x['ours-pairs-per-s']:,} | {x['numpy-pairs-per-s']:,} | "
            f"{x['torch-pairs-per-s']:,} | {x['of-reading-two-gradients']} | "
            f"{x['of-reading-the-difference']} | {x['extra-vectors']} |"
        )
    text.append(f"\nOne thread; memory is read at {lines[0]['read-gb-per-s']} GB/s.\n")
    text.append("| a round of the server | nodes | pairs each | pairs/s | s | vectors in memory |")
    text.append("| --- " * 6 + "|")
    for x in (line for line in lines if line["what"] != "pair_balance"):
        kind = "whole gradients" if x["exact"] else "sketches"
        text.append(
            f"| {kind} of {x['dim']:,} | {x['nodes']} | {x['pairs-per-node']} | "
            f"{x['pairs-per-s']:,} | {x['seconds']} | {x['extra-vectors']} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "server_speed.jsonl")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: figures are for one thread")
    bandwidth = read_gb_per_s(options.repeats)
    lines = [
        balance_speed(100_000, 256, bandwidth, options.repeats),
        balance_speed(1_000_000, 48, bandwidth, options.repeats),
        round_speed(1024, 8, 128, False, options.repeats),
        round_speed(1024, 100, 128, False, options.repeats),
        round_speed(1_000_000, NODES, 1, True, options.repeats),
    ]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(lines)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
