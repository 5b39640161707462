"""Herding bounds of the gradients of partly trained models, which stay as they are.

``sketch``: which one is worth its bytes; ``fleet``: what fleets do that are not the paper's.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_hetero.cd_grab import algorithm
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.papers.cd_grab.herding import relative_herding
from flwr_hetero_studies.papers.cd_grab.orders import D_RR, PAIR_BAL, SKETCHES, Served
from flwr_hetero_studies.papers.cd_grab.tasks import fits, given
from flwr_hetero_studies.papers.cd_grab.train import Gradients, fill_gradients

MODELS = {"softmax": 0.01, "lenet": 0.05, "mlp": 0.01}
"""Models and the learning rate of their 200 steps of training."""
METHODS = (D_RR, PAIR_BAL, *SKETCHES)
PAPER, OURS = "CD-GraB, paper", "CD-GraB, ours"
FLEETS = (
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
NODES, UNITS, BATCH = 16, 64, 4


def plan(options: Options) -> Iterator[Trial]:
    rounds = options.settings["rounds"]
    for seed in options.seeds_or(range(3)):
        for model in (model for model in MODELS if fits(model, options.data)):
            for method in METHODS:
                case = {"experiment": "sketch", "name": f"{model}, {method}", "method": method}
                yield Trial(case | {"model": model, "rounds": 14, "data": options.data}, seed)
        for fleet in FLEETS:
            for method in (D_RR, PAIR_BAL, PAPER, OURS):
                case = {"experiment": "fleet", "name": f"{fleet}, {method}", "method": method}
                yield Trial(case | {"fleet": fleet, "rounds": rounds, "data": options.data}, seed)


def run(case: Case, seed: int, dataset: str) -> dict[str, Any]:
    if case["experiment"] == "sketch":
        grains = gradients(dataset, case["model"], 8, seed)
        bounds = visits(list(grains), case["method"], case["rounds"], seed)
        return {"metrics": {"bound": float(np.mean(bounds[-4:])), "dim": grains.shape[2]}}
    vectors = unequal(case["fleet"], gradients(dataset, "softmax", NODES, seed))
    # the paper has one common sum, whatever happens
    alone = patch.object(algorithm, "own_share", lambda q, m: np.zeros(m))
    with alone if case["method"] == PAPER else nullcontext():
        name = "CD-GraB, k = 1024" if case["method"] in (PAPER, OURS) else case["method"]
        bounds = visits(vectors, name, case["rounds"], seed, case["fleet"])
    return {"metrics": {"bound": float(np.mean(bounds[-10:]))}}


@lru_cache(maxsize=2)
def gradients(dataset: str, name: str, nodes: int, seed: int) -> NDArray[np.float32]:
    """Take the gradients of all units, (nodes, units, dim), after 200 steps of training."""
    task = given(dataset, name, nodes * UNITS * BATCH, seed=seed)
    units = len(task) // (nodes * BATCH) // 2 * 2
    # pairs need an even number of units
    rows = np.arange(nodes * units * BATCH).reshape(nodes, units, BATCH)
    task = replace(task, per_unit=BATCH)
    model, rng = task.make_model(seed), np.random.default_rng(seed)
    gradients_of = Gradients(task, model)
    optimizer = torch.optim.SGD(model.parameters(), MODELS[name])
    # at the start all gradients agree, and orders have little to balance
    for _ in range(200):
        fill_gradients(model, gradients_of.mean(rng.integers(rows.size, size=(1, 64))))
        optimizer.step()
    return np.array([gradients_of.each(own).numpy() for own in rows])


def unequal(fleet: str, grains: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Make each node's units: its own number of grains, alone or put together."""
    if not fleet.startswith("unequal"):
        return list(grains)
    units = grains.shape[1]
    sizes = np.linspace(units // 4, units, NODES).astype(int) // 2 * 2
    kept = [g[:size] for g, size in zip(grains, sizes, strict=True)]
    if fleet.endswith("units of equal size"):
        return [len(g) / sizes.mean() * g for g in kept]
    parts = [np.array_split(g, units // 4) for g in kept]
    return [np.array([p.sum(axis=0) for p in each]) / sizes.mean() for each in parts]


def present(fleet: str, step: int, rng: np.random.Generator) -> list[int]:
    if fleet.startswith("30 %"):
        return sorted(rng.choice(NODES, round(0.3 * NODES), replace=False).tolist())
    if fleet.startswith("two"):
        return list(range(NODES // 2 * (step % 2), NODES // 2 * (step % 2 + 1)))
    if fleet.startswith("a node joins"):
        return list(range(min(NODES, NODES // 2 + step // 3)))
    return list(range(NODES))


def visits(
    vectors: list[NDArray[np.float32]], name: str, rounds: int, seed: int, fleet: str = ""
) -> list[float]:
    """Let nodes visit all units every round, and return the bounds in the full space."""
    rng = np.random.default_rng([seed, 5])
    nodes = Served(name, [len(v) for v in vectors], 1, seed)
    lost = {"20 % lost": 0.2, "20 % of the replies": 0.2, "5 % of the r": 0.05}
    share = next((value for words, value in lost.items() if words in fleet), 0.0)
    bounds = []
    for step in range(rounds):
        here = present(fleet, step, rng) if fleet else list(range(len(vectors)))
        # for all nodes, so that fleets meet the same luck
        draws = rng.random((2, len(vectors)))
        for i in here:
            if "restart" in fleet and draws[0, i] < 0.05:
                nodes.samplers[i] = nodes.new_sampler(i)
        # Alg. 4, l. 15
        nodes.send(here)
        passes = [vectors[i][nodes.visit_all(i, vectors[i])] for i in here]
        reports = nodes.reports([i for i in here if draws[1, i] >= share])
        if "noise" in fleet and "node-00" in reports:
            diffs = reports["node-00"].diffs
            noise = rng.standard_normal(diffs.shape).astype(np.float32)
            noise *= np.float32(10 * np.linalg.norm(diffs) / np.linalg.norm(noise))
            reports["node-00"] = reports["node-00"]._replace(diffs=noise)
        # Alg. 4, l. 8-14
        nodes.end_pass(reports)
        bounds.append(relative_herding(passes[1:] if "noise" in fleet else passes))
    return bounds
