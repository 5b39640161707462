"""Orders in a fleet that is not the paper's: absent nodes, lost replies, restarts, unequal data.

Gradients of softmax regression, partly trained, stay as they are; every round each node that is
there walks once through its units in its order. Measured is the herding bound of all who walked,
in the full space (the mean of the last 10 of 40 rounds, as a multiple of random orders'). Our
nodes and server do what they do in a run: walks, versions, sketches of 1024 numbers.
Usage, from the top folder: ``python -m benchmarks.cd_grab.fleet ../shared/data/fashion_mnist``;
writes ``fleet.jsonl``, a line per case, method and seed.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.cd_grab.parallel import UnitGradients, examples_of, flat
from flwr_hetero.cd_grab import order_server
from flwr_hetero.cd_grab.algorithm import relative_herding
from flwr_hetero.cd_grab.gradients import sketch
from flwr_hetero.cd_grab.node_order import OwnPairs, Reshuffled, ServedWalk, Walk
from flwr_hetero.cd_grab.order_server import OrderServer, Report
from flwr_hetero.task import data_shape, make_model

HERE = Path(__file__).parent
NODES, UNITS, BATCH, ROUNDS, LAST, SKETCH = 16, 64, 4, 40, 10, 1024
CASES = (
    "all nodes, always",
    "30 % of the nodes, at random",
    "two fixed halves in turn",
    "5 % of the replies lost",
    "20 % of the replies lost",
    "30 % of the nodes and 20 % lost",
    "5 % of the nodes restart, state lost",
    "a node joins every third round",
    "one node reports noise, 10 x as long",
    "unequal data, units of equal size",
    "unequal data, equally many units",
)
METHODS = ("D-RR", "ID-GraB(PairBal)", "CD-GraB, paper", "CD-GraB, ours")


def gradients(dataset: str, seed: int) -> np.ndarray:
    """Take the gradients of all units, (nodes, units, dim), after 200 steps of training."""
    shape, num_classes = data_shape(dataset)
    model = make_model("softmax", shape, num_classes, seed=seed)
    examples = examples_of(dataset, NODES * UNITS * BATCH, seed)
    gradients_of, params = UnitGradients(model), flat(model)
    rng = np.random.default_rng(seed)
    for _ in range(200):
        rows = rng.integers(len(examples), size=(1, 64))
        params -= 0.01 * gradients_of(params, examples.inputs[rows], examples.targets[rows])[0]
    rows = np.arange(len(examples)).reshape(-1, BATCH)
    each = gradients_of(params, examples.inputs[rows], examples.targets[rows])
    return each.reshape(NODES, UNITS, -1).numpy()


def vectors_of(case: str, grains: np.ndarray) -> list[np.ndarray]:
    """Make each node's units: its own number of grains, alone or put together."""
    if not case.startswith("unequal"):
        return list(grains)
    sizes = np.linspace(UNITS // 4, UNITS, NODES).astype(int) // 2 * 2
    kept = [g[:size] for g, size in zip(grains, sizes, strict=True)]
    if case.endswith("units of equal size"):
        return [len(g) / sizes.mean() * g for g in kept]
    parts = [np.array_split(g, UNITS // 4) for g in kept]
    return [np.array([p.sum(axis=0) for p in each]) / sizes.mean() for each in parts]


def present(case: str, step: int, rng: np.random.Generator) -> list[int]:
    """Say which nodes walk in a round."""
    if case.startswith("30 %"):
        return sorted(rng.choice(NODES, round(0.3 * NODES), replace=False).tolist())
    if case.startswith("two"):
        return list(range(NODES // 2 * (step % 2), NODES // 2 * (step % 2 + 1)))
    if case.startswith("a node joins"):
        return list(range(min(NODES, NODES // 2 + step // 3)))
    return list(range(NODES))


def one_run(case: str, method: str, grains: np.ndarray, seed: int) -> float:
    """Walk all rounds, and return the settled bound."""
    rng, vectors = np.random.default_rng([seed, 5]), vectors_of(case, grains)
    kind = {"D-RR": Reshuffled, "ID-GraB(PairBal)": OwnPairs}.get(method, ServedWalk)
    walks: list[Walk] = [kind(len(v), 100 * seed + i) for i, v in enumerate(vectors)]
    sketches = [sketch(v, SKETCH, seed) for v in vectors]
    server = OrderServer(exact=method.endswith("paper"))
    lost = {"20 % lost": 0.2, "20 % of the replies": 0.2, "5 % of the r": 0.05}
    share = next((value for words, value in lost.items() if words in case), 0.0)
    bounds = []
    for step in range(ROUNDS):
        reports, passes = [], []
        here = present(case, step, rng)
        draws = rng.random((2, NODES))
        noise = rng.standard_normal((UNITS // 2, SKETCH)).astype(np.float32)
        for i in here:
            if "restart" in case and draws[0, i] < 0.05:
                walks[i] = kind(len(vectors[i]), 100 * seed + i)
            walk, name = walks[i], f"node-{i:02}"
            if isinstance(walk, ServedWalk):
                walk.follow(server.answer(name))
            order = walk.take(len(vectors[i]))
            passes.append(vectors[i][order])
            walk.see(sketches[i][order] if isinstance(walk, ServedWalk) else passes[-1])
            if isinstance(walk, ServedWalk) and draws[1, i] >= share:
                seen = walk.report()
                diffs = seen.diffs
                if "noise" in case and i == 0:
                    usual = np.linalg.norm(diffs) / np.linalg.norm(noise)
                    diffs = np.float32(10 * usual) * noise[: len(diffs)]
                reports.append(Report(name, seen.version, len(order), seen.first_pair, diffs))
        server.receive(reports)
        if step >= ROUNDS - LAST:
            bounds.append(relative_herding(passes[1:] if "noise" in case else passes))
    return float(np.mean(bounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "fleet.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.out.open("w") as file:
        for seed in options.seeds:
            grains = gradients(options.dataset, seed)
            for case in options.cases:
                for method in METHODS:
                    zero = patch.object(order_server, "own_share", lambda q, m: np.zeros(m))
                    if method.endswith("paper"):
                        with zero:
                            bound = one_run(case, method, grains, seed)
                    else:
                        bound = one_run(case, method, grains, seed)
                    line = {"case": case, "method": method, "seed": seed, "bound": bound}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(f"{case:40} {method:18} {seed} {bound:8.3f}", flush=True)


if __name__ == "__main__":
    main()
