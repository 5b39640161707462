"""Virtual time to one training loss on 1, 2, 4 and 8 nodes (the paper's Figure 11).

Usage: ``python benchmarks/pgd/scaling.py --fashion FOLDER [--rounds 60]``. Writes
``scaling.jsonl``, a line per seed, model, rule, link and number of nodes; seeds that are there
already are not run again. ``apps/pgd`` runs on an
emulated fleet as the paper's workers do: the data are split evenly, every node takes one step on
its own (k + r) N / n samples, and the server averages after each. The first pass over the data
and selecting the top take no virtual time. The link changes how long a round lasts and nothing
else, so that each training runs once and a few rounds tell what the other links make of it.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task import evaluate, load_partition
from flwr_hetero.task.data import data_shape
from flwr_hetero.task.models import model_from
from flwr_hetero.task.run import initial_arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "pgd"))
from pgd_app.client_app import app
from pgd_app.task import PGDSettings

HERE = Path(__file__).parent
Line = dict[str, Any]
MODELS = ("mlp", "cnn")
NODES = (1, 2, 4, 8)
RULES = ("topk",)
LINKS_MBPS = (10_000.0, 1000.0)
SECONDS_PER_EXAMPLE = 1e-4
"""Of the 28x28 CNN on one core of a server."""
RATE = 0.1
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


def one_run(
    dataset: str,
    model: str,
    rule: str,
    seed: int,
    nodes: int,
    link_mbps: float,
    rounds: int,
    every: int,
) -> list[dict[str, float]]:
    """Train and return the curve."""
    profile = DeviceProfile(
        uplink_mbps=link_mbps,
        downlink_mbps=link_mbps,
        seconds_per_example=SECONDS_PER_EXAMPLE,
    )
    config = {
        "dataset": dataset,
        "partition": "iid",
        "model": model,
        "rule": rule,
        "seed": seed,
        "step-ratio": 0.02,
        "learning-rate": RATE,
        "local-steps": 1,
        "look-every": 0,
        "full-pass": True,
    }
    settings = PGDSettings.from_run_config(config)
    grid = LocalGrid(app, [profile] * nodes, run_config=config)
    clock = Clock(settings, every)
    steps = ConfigRecord({keys.NUM_STEPS: 1})
    clock.start(
        grid, initial_arrays(settings), rounds, train_config=steps, evaluate_fn=clock.measure
    )
    return clock.curve


def part_of(fashion: str, samples: int, folder: str) -> str:
    """Write the first examples as a data set of their own; return where."""
    for name, count in (("train", samples), ("test", 100)):
        table = pq.read_table(Path(fashion) / f"{name}.parquet").slice(0, count)
        pq.write_table(table, Path(folder) / f"{name}.parquet")
    return folder


def reached(curve: list[dict[str, float]], goal: float) -> float | None:
    """Find the round of the first point at the goal; None if there is none."""
    return next((point["round"] for point in curve if point["loss"] <= goal), None)


def lines(
    dataset: str, model: str, rule: str, seed: int, options: argparse.Namespace
) -> Iterator[Line]:
    """Measure one rule on all fleets and links."""
    alone: dict[float, float | None] = {}
    goal = 0.0
    for nodes in NODES:
        fleet = (dataset, model, rule, seed, nodes)
        curve = one_run(*fleet, LINKS_MBPS[0], options.rounds, options.every)
        if nodes == 1:
            goal = curve[round(GOAL * (len(curve) - 1))]["loss"]
        rounds = reached(curve, goal)
        for link_mbps in LINKS_MBPS:
            end = one_run(*fleet, link_mbps, 2, 1)[-1]
            seconds = rounds and rounds * end["virtual_s"] / end["round"]
            alone.setdefault(link_mbps, seconds)
            yield {
                "task": f"{model}, {options.samples} of Fashion-MNIST",
                "rule": rule,
                "seed": seed,
                "link_mbps": link_mbps,
                "ms_per_example": 1e3 * SECONDS_PER_EXAMPLE,
                "nodes": nodes,
                "loss": goal,
                "virtual_s": seconds,
                "rounds": rounds,
                "speedup": alone[link_mbps] / seconds if seconds else None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fashion", required=True, help="folder of Fashion-MNIST as Parquet")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    results = HERE / "scaling.jsonl"
    text = results.read_text() if results.exists() else ""
    done = {line["seed"] for line in map(json.loads, text.splitlines())}
    with (
        tempfile.TemporaryDirectory() as folder,
        results.open("a", encoding="utf-8") as file,
    ):
        dataset = part_of(options.fashion, options.samples, folder)
        for seed, model, rule in product(set(options.seeds) - done, MODELS, RULES):
            for line in lines(dataset, model, rule, seed, options):
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
