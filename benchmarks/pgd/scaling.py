"""Virtual time to one training loss on 1, 2, 4 and 8 nodes (the paper's Figure 11).

Usage: ``python benchmarks/pgd/scaling.py [--fashion FOLDER] [--rounds 200]``. Writes
``scaling.jsonl``, a line per rule, link and number of nodes. ``apps/pgd`` runs on an emulated
fleet as the paper's workers do: the data are split evenly, every node takes one step on its own
(k + r) N / n samples, and the server averages after each. Selecting the top takes no virtual time.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task import evaluate, load_partition
from flwr_hetero.task.data import data_shape
from flwr_hetero.task.models import model_from
from flwr_hetero.task.server import initial_arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "pgd"))
from pgd_app.client_app import app
from pgd_app.task import PGDSettings

HERE = Path(os.environ.get("OUT") or Path(__file__).parent)
NODES = (1, 2, 4, 8)
RULES = ("uniform", "topk", "stochastic")
LINKS_MBPS = (1000.0, 10_000.0)
SECONDS_PER_EXAMPLE = 1e-4
"""Of the 28x28 CNN on one core of a server."""
GOAL = 0.6
"""The loss that one node has reached at this part of its rounds is the target."""


class Clock(Wrapper):
    """Note the virtual time and the training loss now and then."""

    def __init__(self, settings: PGDSettings, every: int) -> None:
        super().__init__(settings.strategy())
        self.settings, self.every = settings, every
        self.examples = load_partition(settings.dataset, 0, 1, seed=settings.seed)
        self.curve: list[dict[str, float]] = []

    def measure(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate on all training data."""
        if number % self.every:
            return None
        shape = data_shape(self.settings.dataset)
        model = model_from(arrays.to_torch_state_dict(), self.settings.model, *shape)
        loss, _ = evaluate(model, self.examples)
        line = {"round": number, "virtual_s": self.session.virtual_s, "loss": loss}
        self.curve.append(line)
        return MetricRecord({"loss": loss})


def one_run(nodes: int, link_mbps: float, options: argparse.Namespace, rule: str) -> list[dict]:
    profile = DeviceProfile(
        uplink_mbps=link_mbps,
        downlink_mbps=link_mbps,
        seconds_per_example=SECONDS_PER_EXAMPLE,
    )
    config = {
        "dataset": options.fashion or "digits",
        "partition": "iid",
        "model": options.model,
        "rule": rule,
        "step-ratio": 0.02,
        "learning-rate": options.lr,
        "local-steps": 1,
        "look-every": 0,
    }
    settings = PGDSettings.from_run_config(config)
    grid = LocalGrid(app, [profile] * nodes, run_config=config)
    clock = Clock(settings, options.every)
    steps = ConfigRecord({keys.NUM_STEPS: 1})
    clock.start(
        grid, initial_arrays(settings), options.rounds, train_config=steps,
        evaluate_fn=clock.measure,
    )  # fmt: skip
    return clock.curve


def first(curve: list[dict], goal: float) -> dict[str, Any]:
    """Find the first point at the goal; empty figures if there is none."""
    nothing = {"virtual_s": None, "round": None}
    return next((point for point in curve if point["loss"] <= goal), nothing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", help="folder of Fashion-MNIST as Parquet; else digits")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data = "Fashion-MNIST" if options.fashion else "digits"
    with (HERE / "scaling.jsonl").open("w", encoding="utf-8") as file:
        for rule in RULES:
            for link_mbps in LINKS_MBPS:
                alone = None
                for nodes in NODES:
                    curve = one_run(nodes, link_mbps, options, rule)
                    if nodes == 1:
                        goal = curve[round(GOAL * (len(curve) - 1))]["loss"]
                    point = first(curve, goal)
                    alone = alone or point["virtual_s"]
                    line = {
                        "task": f"{options.model}, {data}",
                        "rule": rule,
                        "link_mbps": link_mbps,
                        "nodes": nodes,
                        "loss": goal,
                        "virtual_s": point["virtual_s"],
                        "rounds": point["round"],
                        "speedup": alone / point["virtual_s"] if point["virtual_s"] else None,
                    }
                    file.write(json.dumps(line) + "\n")
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
