"""What the sampler itself costs, as a share of a training step (no scoring passes).

Usage: ``OMP_NUM_THREADS=1 python benchmarks/mercury/overhead.py [--repeats 7]``; prints and
writes ``overhead.jsonl``. Step by step in turns: the 28x28 CNN at batch 32, and ``next_batch``
plus ``update`` for 1,000 to 1,000,000 samples; beside it what plain reshuffling costs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero.sampler import MercurySampler
from flwr_hetero.task import make_model

BATCH, STEPS = 32, 160


def training_step() -> Callable[[], None]:
    model = make_model("cnn", (1, 28, 28), 10)
    inputs, targets = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def sampler_step(sampler: BatchSampler) -> Callable[[], None]:
    scores = np.random.default_rng(0).exponential(size=sampler.num_samples)
    sampler.update(np.arange(sampler.num_samples), scores)

    def step() -> None:
        indices, _ = sampler.next_batch()
        sampler.update(indices, scores[indices])

    return step


def percent(step: Callable[[], None], train: Callable[[], None]) -> float:
    """Return the CPU time of a step in % of a training step; the two take turns.

    Training pushes the sampler's code and data out of the processor's caches: timed by itself,
    the sampler would look several times as fast. Other processes do not count, but for the caches.
    """
    own = training = 0.0
    for _ in range(STEPS):
        start = time.process_time()
        train()
        between = time.process_time()
        step()
        own += time.process_time() - between
        training += between - start
    return 100 * own / training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    train = training_step()
    most = 60_000
    cases = {
        "uniform, 60,000 samples": sampler_step(UniformSampler(most, BATCH)),
        **{
            f"flat, {n:,} samples": sampler_step(MercurySampler(n, BATCH, gate=0.0))
            for n in (1000, most, 1_000_000)
        },
        "flat, gate closed, 60,000 samples": sampler_step(MercurySampler(most, BATCH, gate=1e9)),
        "cycle, 94 groups, 60,000 samples": sampler_step(
            MercurySampler(most, BATCH, estimator="cycle", num_groups=94)
        ),
    }
    for step in cases.values():
        percent(step, train)
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, step in cases.items():
            ratios[name].append(percent(step, train))
    lines = [
        {
            "case": name,
            "percent_of_step": round(statistics.median(values), 2),
            "lowest": round(min(values), 2),
            "highest": round(max(values), 2),
        }
        for name, values in ratios.items()
    ]
    for line in lines:
        print(
            f"{line['case']:36s} {line['percent_of_step']:.2f} % of a training step "
            f"({line['lowest']:.2f} to {line['highest']:.2f})"
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (Path(__file__).parent / "overhead.jsonl").write_text(text)


if __name__ == "__main__":
    main()
