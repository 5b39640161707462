"""What scoring in the background adds to a node's own part of a round.

The scoring itself goes on in a detached process of the lowest priority and is not counted.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.mercury.background import SCORES, collect_scores, start_scoring
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.tasks import make_model

BATCH, STEPS, PATIENCE_S = 32, 20, 120.0


def plan(options: Options) -> Iterator[Trial]:
    """Yield all runs; each is alone, for it measures time."""
    for samples in (500, 2000):
        case = {"experiment": "handover", "name": f"{samples} samples", "samples": samples}
        yield Trial(case | {"repeats": 1 if options.fast else 5}, alone=True)


def run(case: Case) -> dict[str, Any]:
    """Measure some times; return the medians, and the extremes of what is added."""
    turns = [one_turn(case["samples"]) for _ in range(case["repeats"])]
    names = ("training_s", "handing_over_s", "collecting_s")
    metrics = {n: median(column) for n, column in zip(names, zip(*turns, strict=True), strict=True)}
    added = [handed + collected for _, handed, collected in turns]
    metrics |= {"added_s": median(added), "lowest_s": min(added), "highest_s": max(added)}
    return {"metrics": {name: round(value, 4) for name, value in metrics.items()}}


def one_turn(samples: int) -> tuple[float, float, float]:
    """Return seconds of training, of handing over and of collecting."""
    model = make_model("cnn", (1, 28, 28), 10)
    inputs, targets = torch.randn(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
    optimizer, start_s = torch.optim.SGD(model.parameters(), 0.01), time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(inputs[:BATCH]), targets[:BATCH]).backward()
        optimizer.step()
    trained_s = time.perf_counter()
    # from here on the node's own part, but for the wait
    folder = start_scoring(model, inputs, targets, limit_s=PATIENCE_S)
    started_s = time.perf_counter()
    scores = Path(folder) / SCORES
    while not (scores.exists() and scores.stat().st_size == 8 * samples):
        if time.perf_counter() - started_s > PATIENCE_S:
            raise TimeoutError("the worker did not score in time")
        time.sleep(0.1)
    waited_s = time.perf_counter()
    if len(collect_scores(folder)[0]) != samples:
        raise RuntimeError("the worker did not score all samples")
    return trained_s - start_s, started_s - trained_s, time.perf_counter() - waited_s
