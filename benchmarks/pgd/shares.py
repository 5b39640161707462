"""Distribution of priorities and what the top examples contribute (the paper's Figure 1).

Usage: ``python benchmarks/pgd/shares.py [--fashion FOLDER]``. Writes ``shares.jsonl``: for some
iterations of SGD, quantiles of all priorities, the part of their sum that the top k hold, and
the part of the loss decrease of a full gradient step that a step on the top k alone achieves,
measured, at the same small learning rate.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from one_run import EVALUATION_BATCH, LOSS, backward
from tasks import Task, make_task
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.pgd.algorithm import top_share
from flwr_hetero.pgd.priorities import all_priorities

HERE = Path(__file__).parent
ITERATIONS = (0, 10, 50, 200, 600)
TOPS = (0.005, 0.01, 0.02, 0.05)
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
SMALL_STEP = 1e-3
"""Learning rate of the measured steps: small enough for the first order to hold."""


def total_loss(task: Task, model: nn.Module) -> float:
    """Sum of the losses over the data, in double precision."""
    with torch.no_grad():
        parts = zip(
            task.inputs.split(EVALUATION_BATCH), task.targets.split(EVALUATION_BATCH), strict=True
        )
        return sum(float(LOSS(model(x), y).double().sum()) for x, y in parts)


def decrease(task: Task, model: nn.Module, gradient: dict[str, Tensor]) -> float:
    """Loss decrease of a small step along the gradient over N; the model is put back."""
    before, size = total_loss(task, model), SMALL_STEP / len(task.targets)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= size * gradient[name]
        after = total_loss(task, model)
        for name, p in model.named_parameters():
            p.copy_(own[name])
    return before - after


def look(task: Task, model: nn.Module) -> dict[str, object]:
    data = (task.inputs, task.targets)
    priorities, total = all_priorities(model, LOSS, *data, batch_size=EVALUATION_BATCH)
    order, whole = np.argsort(-priorities), decrease(task, model, total)
    lines = {}
    for top in TOPS:
        chosen = order[: max(1, round(top * len(order)))]
        some = (task.inputs[chosen], task.targets[chosen])
        _, gradient = all_priorities(model, LOSS, *some)
        lines[top] = {
            "of_priorities": top_share(priorities, top),
            "of_decrease": decrease(task, model, gradient) / whole,
            "most_frequent_class": float(
                task.targets[chosen].bincount().max() / len(chosen)
            ),
        }  # fmt: skip
    scale = np.abs(priorities).mean()
    return {
        "levels": QUANTILES,
        "quantiles": (np.quantile(priorities, QUANTILES) / scale).tolist(),
        "negative": float((priorities < 0).mean()),
        "tops": lines,
        "loss": total_loss(task, model) / len(order),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=["mlp-synthetic", "mlp-fashion"])
    parser.add_argument("--fashion", help="folder of Fashion-MNIST as Parquet")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (HERE / "shares.jsonl").open("w", encoding="utf-8") as file:
        for name in options.tasks:
            task = make_task(name, options.samples, options.fashion)
            model = task.make(0)
            optimizer = torch.optim.SGD(model.parameters(), options.lr)
            sampler = UniformSampler(len(task.targets), len(task.targets) // 50, seed=0)
            for iteration in range(max(ITERATIONS) + 1):
                if iteration in ITERATIONS:
                    line = {"task": name, "samples": options.samples, "iteration": iteration}
                    line |= look(task, model)
                    file.write(json.dumps(line) + "\n")
                    print(json.dumps(line))
                backward(task, model, optimizer, sampler.next_batch())
                optimizer.step()


if __name__ == "__main__":
    main()
