"""The paper's synthetic experiment (Fig. 10): the herding bound of fixed vectors, round by round.

Vectors of 16 numbers, uniform in [0, 1], centred, of length 1, are dealt to 5 to 100 nodes.
Each method makes orders from them for some rounds; nothing is trained.
Usage, from the top folder: ``python -m benchmarks.cd_grab.synthetic --num-vectors 65536``
(seconds per number of nodes; the paper's size is 1000000). Writes ``synthetic_65536.jsonl``, a line
per number of nodes, method and seed, and draws it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cd_grab.synthetic_report import write_report
from flwr_hetero.cd_grab.algorithm import (
    herding_bound,
    pair_balance,
    reorder,
    self_balancing_walk,
    unit_signs,
)

HERE = Path(__file__).parent
NUM_NODES = (5, 10, 20, 50, 100)
DIM = 16

Vectors = NDArray[np.float64]
Orders = NDArray[np.int64]
Balance = Callable[[Vectors, Vectors], tuple[Vectors, NDArray[np.int8]]]


def make_vectors(num_vectors: int, num_nodes: int, seed: int) -> Vectors:
    """Deal vectors evenly; each node gets an even number of them, a few are left over."""
    vectors = np.random.default_rng(seed).random((num_vectors, DIM))
    vectors -= vectors.mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    num_units = num_vectors // num_nodes // 2 * 2
    return vectors[: num_nodes * num_units].reshape(num_nodes, num_units, DIM)


def first_orders(vectors: Vectors, rng: np.random.Generator) -> Orders:
    return np.array([rng.permutation(vectors.shape[1]) for _ in vectors])


def cd_grab(vectors: Vectors, orders: Orders, balance: Balance = pair_balance) -> Orders:
    """One epoch of Algorithm 4: all nodes' pairs in one sequence, step by step."""
    num_nodes, num_units, dim = vectors.shape
    visited = np.take_along_axis(vectors, orders[:, :, None], axis=1)
    diffs = (visited[:, 0::2] - visited[:, 1::2]).swapaxes(0, 1).reshape(-1, dim)
    _, signs = balance(np.zeros(dim), diffs)
    columns = signs.reshape(-1, num_nodes).T
    return np.array(
        [reorder(o, unit_signs(s, num_units)) for o, s in zip(orders, columns, strict=True)]
    )


def each_alone(vectors: Vectors, orders: Orders) -> Orders:
    """ID-GraB(PairBal): a sum for each node."""
    return np.concatenate([cd_grab(v[None], o[None]) for v, o in zip(vectors, orders, strict=True)])


def against_mean(vectors: Vectors, orders: Orders, means: Vectors) -> Orders:
    """ID-GraB(Bal): each unit against its node's mean in the round before."""
    signs = [
        pair_balance(np.zeros(v.shape[1]), v[o] - mean)[1]
        for v, o, mean in zip(vectors, orders, means, strict=True)
    ]
    return np.array([reorder(o, s) for o, s in zip(orders, signs, strict=True)])


def orders_of(method: str, vectors: Vectors, seed: int) -> Iterator[Orders]:
    """Yield the orders of all nodes, round by round."""
    rng = np.random.default_rng([seed, 1])
    orders, means = first_orders(vectors, rng), np.zeros_like(vectors[:, 0])
    draws = np.random.default_rng([seed, 2])

    def walk(c: float) -> Balance:
        return lambda total, diffs: self_balancing_walk(total, diffs, draws, c=c)

    while True:
        yield orders
        if method == "D-RR":
            orders = first_orders(vectors, rng)
        elif method == "ID-GraB(Bal)":
            orders, means = against_mean(vectors, orders, means), vectors.mean(axis=1)
        elif method == "ID-GraB(PairBal)":
            orders = each_alone(vectors, orders)
        else:
            balances = {"CD-GraB": pair_balance, "walk c=30": walk(30.0), "walk c=4": walk(4.0)}
            orders = cd_grab(vectors, orders, balances[method])


METHODS = ("D-RR", "ID-GraB(Bal)", "ID-GraB(PairBal)", "CD-GraB", "walk c=30", "walk c=4")


def one_run(num_vectors: int, num_nodes: int, method: str, seed: int, rounds: int) -> dict:
    vectors = make_vectors(num_vectors, num_nodes, seed)
    start, orders = time.perf_counter(), orders_of(method, vectors, seed)
    bounds = [herding_bound(vectors, next(orders)) for _ in range(rounds)]
    return {
        "num-vectors": num_vectors,
        "nodes": num_nodes,
        "method": method,
        "seed": seed,
        "bounds": [float(f"{bound:.5g}") for bound in bounds],
        "seconds": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-vectors", type=int, default=65_536)
    parser.add_argument("--nodes", type=int, nargs="+", default=NUM_NODES)
    parser.add_argument("--methods", nargs="+", default=METHODS[:4], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--out", type=Path, help="synthetic_NUM-VECTORS.jsonl if left out")
    options = parser.parse_args()
    options.out = options.out or HERE / f"synthetic_{options.num_vectors}.jsonl"
    with options.out.open("w") as file:
        for num_nodes in options.nodes:
            for method in options.methods:
                for seed in options.seeds:
                    line = one_run(options.num_vectors, num_nodes, method, seed, options.rounds)
                    last = np.mean(line["bounds"][-3:])
                    print(f"{num_nodes:4} nodes  {method:18} {last:9.3f}  {line['seconds']:7.1f} s")
                    file.write(json.dumps(line) + "\n")
                    file.flush()
    write_report(options.out)


if __name__ == "__main__":
    main()
