"""Herding bounds of the gradients of partly trained models, which stay as they are.

``sketch``: which sketch is worth its bytes; ``fleet``: what happens on fleets other than the
paper's.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_hetero.cd_grab import algorithm
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.cd_grab.orders import D_RR, PAIR_BAL, SKETCHES, Served
from flwr_hetero_studies.papers.cd_grab.tasks import given
from flwr_hetero_studies.papers.cd_grab.train import Gradients, fill_gradients

SETTINGS = {"rounds": 40}
"""Rounds of the fleets."""
FAST = {"rounds": 3}
FAST_CASES = ["sketch/softmax, CD-GraB, k = 64", "fleet/*lost, CD-GraB, *"]
MODELS = {"softmax": 0.01, "lenet": 0.05, "mlp": 0.01}
"""Models, and the learning rate of their 200 steps of training."""
METHODS = (D_RR, PAIR_BAL, *SKETCHES)
PAPER = "CD-GraB, paper"
OURS = "CD-GraB, ours"
SKETCHED = "CD-GraB, k = 1024"
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
NODES = 16
UNITS = 64
BATCH = 4
Grains = NDArray[np.float32]
"""Gradients of a node's units: (num_units, dim)."""


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    rounds = options.settings["rounds"]
    for seed in options.seeds_or(range(3)):
        for model in MODELS:
            # LeNet is too large for the 8x8 pixels of the digits
            if model == "lenet" and options.data == "digits":
                continue
            for method in METHODS:
                case = {"experiment": "sketch", "name": f"{model}, {method}", "method": method}
                yield Trial(case | {"model": model, "rounds": 14, "data": options.data}, seed)
        for fleet in FLEETS:
            for method in (D_RR, PAIR_BAL, PAPER, OURS):
                case = {"experiment": "fleet", "name": f"{fleet}, {method}", "method": method}
                yield Trial(case | {"fleet": fleet, "rounds": rounds, "data": options.data}, seed)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    method = case["method"]
    if case["experiment"] == "sketch":
        grains = gradients(data.source, case["model"], 8, seed)
        bounds = bounds_of(list(grains), method, case["rounds"], seed)
        return {"metrics": {"bound": float(np.mean(bounds[-4:])), "dim": grains.shape[2]}}
    vectors = unequal(case["fleet"], gradients(data.source, "softmax", NODES, seed))
    # the paper has one common sum, whatever happens
    without_own_sums = patch.object(algorithm, "own_share", lambda q, m: np.zeros(m))
    with without_own_sums if method == PAPER else nullcontext():
        order = SKETCHED if method in (PAPER, OURS) else method
        bounds = bounds_of(vectors, order, case["rounds"], seed, case["fleet"])
    return {"metrics": {"bound": float(np.mean(bounds[-10:]))}}


def relative_herding(passes: Sequence[NDArray[np.floating]]) -> float:
    r"""Eq. 8 in the Euclidean norm, which sketches keep, over a unit's usual deviation.

    .. math:: \max_l \Big\| \sum_{j \le l} \sum_i (v_{ij} - \bar v_i) \Big\|_2 \Big/
              \sqrt{\operatorname{mean}_{ij} \| v_{ij} - \bar v_i \|_2^2}

    passes: per node (num_units, dim), its vectors in the order of the visit; a shorter pass adds
    nothing to longer prefixes. Free of the scale of gradients, which falls in training.

    >>> relative_herding([np.array([[5.0], [5.0], [3.0], [3.0]])])
    2.0
    """
    centred = [np.asarray(each, np.float64) for each in passes]
    centred = [each - each.mean(axis=0) for each in centred]
    steps = np.zeros((max(map(len, centred)), centred[0].shape[1]))
    for each in centred:
        steps[: len(each)] += each
    furthest = np.linalg.norm(np.cumsum(steps, axis=0), axis=1).max()
    squares = np.concatenate([np.square(each).sum(axis=1) for each in centred])
    return float(furthest / (np.sqrt(squares.mean()) or 1.0))


@lru_cache(maxsize=2)
def gradients(dataset: str, name: str, nodes: int, seed: int) -> Grains:
    """Compute the gradients of all units, (nodes, units, dim), after 200 steps of training."""
    task = given(dataset, name, nodes * UNITS * BATCH, seed=seed)
    # pairs need an even number of units
    units = len(task) // (nodes * BATCH) // 2 * 2
    rows = np.arange(nodes * units * BATCH).reshape(nodes, units, BATCH)
    task = replace(task, per_unit=BATCH)
    model = task.make_model(seed)
    rng = np.random.default_rng(seed)
    gradients_of = Gradients(task, model)
    optimizer = torch.optim.SGD(model.parameters(), MODELS[name])
    # at the start all gradients agree, and orders have little to balance
    for _ in range(200):
        fill_gradients(model, gradients_of.mean(rng.integers(rows.size, size=(1, 64))))
        optimizer.step()
    return np.array([gradients_of.each(units_of_node).numpy() for units_of_node in rows])


def unequal(fleet: str, grains: Grains) -> list[Grains]:
    """Make each node's units of its gradients: some of them, or sums of some."""
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
    """Return the nodes that take part in a round."""
    if fleet.startswith("30 %"):
        return sorted(rng.choice(NODES, round(0.3 * NODES), replace=False).tolist())
    if fleet.startswith("two"):
        return list(range(NODES // 2 * (step % 2), NODES // 2 * (step % 2 + 1)))
    if fleet.startswith("a node joins"):
        return list(range(min(NODES, NODES // 2 + step // 3)))
    return list(range(NODES))


def bounds_of(
    vectors: list[Grains], method: str, rounds: int, seed: int, fleet: str = ""
) -> list[float]:
    """Let nodes visit all units every round, and return the bounds in the full space."""
    rng = np.random.default_rng([seed, 5])
    nodes = Served(method, [len(v) for v in vectors], seed)
    lost = {"20 % lost": 0.2, "20 % of the replies": 0.2, "5 % of the r": 0.05}
    share = next((value for words, value in lost.items() if words in fleet), 0.0)
    is_noisy = "noise" in fleet
    bounds = []
    for step in range(rounds):
        here = present(fleet, step, rng) if fleet else list(range(len(vectors)))
        # for all nodes, so that all fleets have the same draws
        draws = rng.random((2, len(vectors)))
        for i in here:
            if "restart" in fleet and draws[0, i] < 0.05:
                nodes.samplers[i] = nodes.new_sampler(i)
        # Alg. 4, l. 15
        nodes.send(here)
        passes = [vectors[i][nodes.visit_all(i, vectors[i])] for i in here]
        reports = nodes.reports([i for i in here if draws[1, i] >= share])
        if is_noisy and "node-00" in reports:
            diffs = reports["node-00"].diffs
            noise = rng.standard_normal(diffs.shape).astype(np.float32)
            noise *= np.float32(10 * np.linalg.norm(diffs) / np.linalg.norm(noise))
            reports["node-00"] = reports["node-00"]._replace(diffs=noise)
        # Alg. 4, l. 8-14
        nodes.end_pass(reports)
        bounds.append(relative_herding(passes[1:] if is_noisy else passes))
    return bounds
