"""Which sketch is worth its bytes, by size of the model: the herding bound of fixed gradients.

Gradients of partly trained models stay as they are; 8 nodes with 64 units each walk through them
for 14 passes. Measured is the bound in the full space, over the last 4 passes, as a multiple of
random orders'. What needs no bytes at all, ID-GraB(PairBal), is what a sketch has to beat.
Usage, from the top folder: ``python -m benchmarks.cd_grab.sketches ../shared/data/fashion_mnist``;
writes ``sketches.jsonl``, a line per model, method and seed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.cd_grab.parallel import UnitGradients, examples_of, flat
from flwr_hetero.cd_grab.gradients import sketch
from flwr_hetero.cd_grab.node_order import OwnPairs, Reshuffled, ServedWalk
from flwr_hetero.cd_grab.order_server import OrderServer, Report
from flwr_hetero.task import data_shape, make_model

HERE = Path(__file__).parent
NODES, UNITS, BATCH, PASSES, LAST = 8, 64, 4, 14, 4
MODELS = {"softmax": 0.01, "lenet": 0.05, "mlp": 0.01}
"""Models and the learning rate of their 200 steps of training."""
METHODS = ("D-RR", "ID-GraB(PairBal)", "16", "64", "256", "1024", "4096", "whole gradients")


def gradients(dataset: str, name: str, seed: int) -> np.ndarray:
    """Take all units' gradients, (nodes, units, dim), each node's around its mean."""
    shape, num_classes = data_shape(dataset)
    model = make_model(name, shape, num_classes, seed=seed)
    examples = examples_of(dataset, NODES * UNITS * BATCH, seed)
    gradients_of, params = UnitGradients(model), flat(model)
    rng = np.random.default_rng(seed)
    for _ in range(200):
        rows = rng.integers(len(examples), size=(1, 32))
        step = gradients_of(params, examples.inputs[rows], examples.targets[rows])[0]
        params = params - MODELS[name] * step
    rows = np.arange(len(examples)).reshape(NODES, UNITS, BATCH)
    each = [gradients_of(params, examples.inputs[r], examples.targets[r]).numpy() for r in rows]
    return np.array([vectors - vectors.mean(axis=0) for vectors in each])


def bound(vectors: np.ndarray, orders: list[np.ndarray]) -> float:
    """Measure how far the prefixes get from the mean."""
    steps = sum(v[order] for v, order in zip(vectors, orders, strict=True))
    return float(np.linalg.norm(np.cumsum(steps, axis=0), axis=1).max())


def settled(vectors: np.ndarray, method: str, seed: int) -> float:
    """Walk all passes and return the mean bound of the last ones."""
    kind = {"D-RR": Reshuffled, "ID-GraB(PairBal)": OwnPairs}.get(method, ServedWalk)
    walks = [kind(UNITS, 100 * seed + i) for i in range(NODES)]
    size = int(method) if method.isdigit() else 0
    shown = [sketch(v, size, seed).astype(np.float16) for v in vectors] if size else vectors
    server, bounds = OrderServer(exact=not size), []
    for number in range(PASSES):
        reports, orders = [], []
        for i, walk in enumerate(walks):
            if isinstance(walk, ServedWalk):
                walk.follow(server.answer(str(i)))
            orders.append(walk.take(UNITS))
            if walk.watching:
                walk.see(np.asarray(shown[i][orders[-1]], np.float32))
            if isinstance(walk, ServedWalk):
                seen = walk.report()
                reports.append(Report(str(i), seen.version, UNITS, seen.first_pair, seen.diffs))
        server.receive(reports)
        if number >= PASSES - LAST:
            bounds.append(bound(vectors, orders))
    return float(np.mean(bounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "sketches.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.out.open("w") as file:
        for seed in options.seeds:
            for name in MODELS:
                vectors = gradients(options.dataset, name, seed)
                for method in METHODS:
                    line = {"model": name, "dim": vectors.shape[2], "method": method}
                    line |= {"seed": seed, "bound": settled(vectors, method, seed)}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(line, flush=True)


if __name__ == "__main__":
    main()
