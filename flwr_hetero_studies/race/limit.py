r"""The least time in which SGD on nodes of unequal speed is known to reach a target.

Tyurin and Richtarik, *Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a
Fixed Computation Model*, NeurIPS 2023. Node i takes :math:`\tau_i` seconds for the gradient of an
example, :math:`\tau_1 \le \dots \le \tau_n`. The least time is :math:`T_{same}` if all nodes draw
from the same data (Rennala SGD), and :math:`T_{own}` if each has its own (Malenia SGD):

.. math:: T_{same} = S \min_m \frac{m + B}{\sum_{i \le m} 1 / \tau_i}, \qquad
          T_{own} = S \left( \tau_n + \frac{B}{n} \cdot \frac{1}{n} \sum_i \tau_i \right)

S is the number of steps without any noise, and B the batch size from which on more examples in a
step do not pay. SGD on the pooled data takes :math:`E(b) = S (b + B)` examples in batches of b.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import mean
from typing import Any

import numpy as np

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.curves import columns
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race.cells import CELLS, MAIN
from flwr_hetero_studies.race.methods import BASE, OURS
from flwr_hetero_studies.race.network import network_of, train_numpy
from flwr_hetero_studies.race.node import Learning
from flwr_hetero_studies.race.outcomes import TARGETS, Contest, reach, smooth
from flwr_hetero_studies.race.tuning import DEVELOPMENT
from flwr_hetero_studies.race.watch import RunningAverage

RUNS = "limit"
TUNING = "limit tuning"
BATCHES = (4, 8, 16, 32, 64, 128)
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
EXAMPLES = 97_200
"""Examples of a run."""
LOOK = 1_215
"""Examples between two looks at its model."""
BETWEEN = 300
"""Examples between two models of the average."""
WINDOW = 8
HEAD = ["seconds to FedAvg's end less a point, main cell, 20 at work", "", "FedSlice's = 1"]


def is_limit(line: Line) -> bool:
    return line["case"]["experiment"] in (RUNS, TUNING)


def plan(options: Options, lines: Sequence[Line]) -> Iterator[Trial]:
    """Try rates for each batch size on the validation split, then run the best one to be tested."""
    seed, *_ = DEVELOPMENT
    for batch in BATCHES:
        case = {"experiment": TUNING, "name": f"batches of {batch}", "batch": batch}
        for rate in RATES:
            yield Trial(case | {"rate": rate}, seed, {"split": "valid"})
        tried = record.of(lines, **case)
        if len(tried) < len(RATES):
            continue
        best = max(tried, key=lambda line: float(np.mean(smooth(line))))
        case |= {"experiment": RUNS, "rate": best["case"]["rate"]}
        for reported in options.seeds_or(range(CELLS[MAIN].seeds)):
            yield Trial(case, reported, {"split": "test"})


def run(case: Case, seed: int, data: Data, split: str) -> dict[str, Any]:
    learning = CELLS[MAIN].learning(data, seed)
    return pooled(learning, case["batch"], case["rate"], split, EXAMPLES, LOOK, WINDOW, BETWEEN)


def pooled(
    learning: Learning,
    batch: int,
    rate: float,
    split: str,
    most: float,
    look: float,
    window: int,
    between: int,
) -> dict[str, Any]:
    """Train on all data in one place; ``between``: examples between two models of the average."""
    net = network_of(learning.first())
    pool = learning.splits["train"]
    sampler = UniformSampler(len(pool), batch, seed=learning.seed)
    average = RunningAverage(window)
    points: list[dict[str, Any]] = []
    examples = 0
    next_look = look
    steps = max(1, between // batch)
    while examples < most:
        examples += train_numpy(net, pool, sampler, steps, rate).examples_processed
        average.add({str(n): array.copy() for n, array in enumerate(net)})
        if examples >= next_look:
            next_look = examples + look
            right, slow = learning.measure(average.model, [0], split)
            points.append({"examples": examples, "all": right, "slow": slow})
    curve = columns(points)
    # There is neither a clock nor a message.
    unknown = dict.fromkeys(("virtual_s", "bytes", "device_s"), curve["examples"])
    return {"metrics": {"failed": ""}, "curve": curve | unknown}


def fitted(examples: Mapping[int, float]) -> tuple[float, float]:
    """Return S and B of the task, given the examples that each batch size takes.

    The logarithms are fitted, so that each batch size has the same weight.

    >>> fitted({10: 3000.0, 20: 4000.0, 40: 6000.0})
    (100.0, 20.0)
    """
    sizes = np.array(list(examples), np.float64)
    taken = np.array(list(examples.values()))
    noises = np.concatenate([[0.0], np.geomspace(0.1, 1000, 8001)])
    # For a given B, the best logarithm of S is the mean difference of the logarithms.
    gaps = np.log(taken) - np.log(sizes + noises[:, None])
    place = int(gaps.std(axis=1).argmin())
    return round(float(np.exp(gaps[place].mean())), 2), round(float(noises[place]), 2)


def least_s(step_s: Sequence[float], steps: float, noise: float) -> tuple[float, float]:
    """Return the least seconds with the same data on all nodes, and with data of their own.

    step_s: (num_nodes,), seconds of a gradient of one example.

    >>> least_s([1.0, 1.0, 4.0], steps=10.0, noise=6.0)
    (40.0, 80.0)
    """
    rising = np.sort(np.asarray(step_s, np.float64))
    counts = np.arange(1, len(rising) + 1)
    same = steps * np.min((counts + noise) / np.cumsum(1 / rising))
    own = steps * (rising[-1] + rising.mean() * noise / len(rising))
    return float(same), float(own)


def section(lines: Sequence[Line], contest: Contest | None) -> dict[str, str]:
    """Tabulate the limits beside what FedSlice and FedAvg took, by the means over seeds."""
    pooled_lines = record.of(lines, experiment=RUNS)
    if contest is None or not pooled_lines or OURS not in contest.runs:
        return {}
    examples: dict[int, float] = {}
    for batch, runs in record.by(pooled_lines, "batch").items():
        ends = {seed: yard["metrics"]["limits"]["end"] for seed, yard in contest.yard.items()}
        taken = [reach(line, ends[line["seed"]] + TARGETS[0])["examples"] for line in runs]
        if all(map(isfinite, taken)):
            examples[batch] = mean(taken)
    if len(examples) < 3:
        return {}
    steps, noise = fitted(examples)
    devices = CELLS[MAIN].fleet(0)
    same_s, own_s = least_s(
        [d.seconds_per_example / d.compute_factor for d in devices], steps, noise
    )
    ours_s = contest.rank(OURS, TARGETS[0])
    rows = {
        "least possible, the same data on all nodes": same_s,
        "least possible, each node its own data": own_s,
        OURS: ours_s,
        BASE: contest.rank(BASE, TARGETS[0]),
    }
    cells = [[name, f"{s:.1f}", f"{s / ours_s:.2f}"] for name, s in rows.items()]
    pooled_text = ", ".join(f"{count:.0f} ({batch})" for batch, count in examples.items())
    return {"limit": tables.table(HEAD, cells), "pooled": pooled_text,
            "limit_steps": f"{steps:.0f}", "limit_noise": f"{noise:.0f}"}  # fmt: skip
