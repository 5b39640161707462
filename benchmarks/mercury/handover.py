"""What scoring in the background adds to a node's own part of a round: handing over, collecting.

Usage: ``OMP_NUM_THREADS=1 python benchmarks/mercury/handover.py [--repeats 5]``; prints and writes
``handover.jsonl``. In turns: 20 training steps of the 28x28 CNN at batch 32, ``start_scoring``
of 500 or 2,000 of its samples, and, when all are scored, ``collect_scores``. The scoring itself
goes on in a detached process of the lowest priority and is not counted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.mercury.background import SCORES, collect_scores, start_scoring
from flwr_hetero.task import make_model

STEPS, BATCH, PATIENCE_S = 20, 32, 120.0


def one_turn(model: torch.nn.Module, samples: int) -> tuple[float, float, float]:
    """Return seconds of training, of handing over and of collecting."""
    inputs, targets = torch.randn(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    start_s = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(inputs[:BATCH]), targets[:BATCH]).backward()
        optimizer.step()
    trained_s = time.perf_counter()
    folder = start_scoring(model, inputs, targets, "loss", limit_s=PATIENCE_S)
    started_s = time.perf_counter()
    scores = Path(folder) / SCORES
    while not (scores.exists() and scores.stat().st_size == 8 * samples):
        if time.perf_counter() - started_s > PATIENCE_S:
            raise TimeoutError("the worker did not score in time")
        time.sleep(0.1)
    waited_s = time.perf_counter()
    collected = collect_scores(folder)
    end_s = time.perf_counter()
    if len(collected.scores) != samples:
        raise RuntimeError(f"{len(collected.scores)} of {samples} scores")
    return trained_s - start_s, started_s - trained_s, end_s - waited_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model, lines = make_model("cnn", (1, 28, 28), 10), []
    for samples in (500, 2000):
        turns = [one_turn(model, samples) for _ in range(repeats)]
        added = [handed + collected for _, handed, collected in turns]
        line: dict[str, object] = {"samples": samples, "repeats": repeats}
        for place, name in enumerate(("training", "handing over", "collecting")):
            line[f"{name} s"] = round(statistics.median(turn[place] for turn in turns), 4)
        line |= {"added s": round(statistics.median(added), 4)}
        line |= {"lowest s": round(min(added), 4), "highest s": round(max(added), 4)}
        lines.append(line)
        print(line, flush=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (Path(__file__).parent / "handover.jsonl").write_text(text)


if __name__ == "__main__":
    main()
