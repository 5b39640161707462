"""One training run of ``apps/biased-local-sgd`` on an emulated fleet, in this process."""

import logging
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from flwr.app import ArrayRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "biased-local-sgd"))
from biased_app.client_app import app
from biased_app.task import BiasedSettings

DECAYS = (0.6, 0.8)
"""Parts of the epochs after which the learning rate falls to a tenth (the paper's Table 4)."""
EVALUATIONS = 5
"""Tests of the global model in a run, beside the first and the last."""


class Progress(Wrapper):
    """End a run in time; lower the learning rate on the way; note what happened.

    ``epochs`` and ``budget_s`` limit the examples processed, as a multiple of the data, and the
    virtual time; whichever is used up first ends the run.
    """

    def __init__(
        self,
        settings: BiasedSettings,
        grid: LocalGrid,
        samples: int,
        epochs: float,
        budget_s: float,
    ) -> None:
        super().__init__(settings.strategy())
        self.settings, self.grid, self.samples = settings, grid, samples
        self.epochs, self.budget_s = epochs, budget_s
        self.measure = central_evaluate(settings)
        self.epochs_done = 0.0
        self.rounds: list[dict[str, float]] = []

    @property
    def used(self) -> float:
        """Part of the run that is over."""
        return max(self.epochs_done / self.epochs, self.session.virtual_s / self.budget_s)

    def on_replies(self, server_round: int, replies: list[Any]) -> list[Any]:
        """Count the examples processed and set the nodes' learning rate."""
        for reply in replies:
            (metrics,) = reply.content.metric_records.values()
            self.epochs_done += float(metrics[keys.EXAMPLES_PROCESSED]) / self.samples
        decay = 0.1 ** sum(self.used >= part for part in DECAYS)
        for node_id in self.grid.get_node_ids():
            rate = self.settings.learning_rate * decay
            self.grid.context(node_id).run_config["learning-rate"] = rate
        return replies

    def evaluate(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Measure the model now and then, and at the end."""
        over = self.used >= 1
        if not over and self.used < len(self.rounds) / (EVALUATIONS + 1):
            return None
        if over:
            self.session.stop_reason = "the run is as long as it shall be"
        metrics = self.measure(number, arrays)
        line = {"round": number, "epochs": self.epochs_done, "virtual_s": self.session.virtual_s}
        self.rounds.append(line | {"accuracy": float(metrics["accuracy"])})
        return metrics


@lru_cache(maxsize=4)
def subset(dataset: str, rows: int) -> str:
    """Write the first rows of a Parquet data set, and all of its test rows, to a folder."""
    folder = Path(tempfile.mkdtemp(prefix="subset-"))
    train = pq.read_table(Path(dataset) / "train.parquet")
    pq.write_table(train.slice(0, rows), folder / "train.parquet")
    pq.write_table(pq.read_table(Path(dataset) / "test.parquet"), folder / "test.parquet")
    return str(folder)


def fleet(num_fast: int, num_slow: int, fast_steps: int, slow_steps: int) -> list[DeviceProfile]:
    """Make fast nodes so much faster that their tau_F steps last as long as tau_S slow ones."""
    fast = DeviceProfile(compute_factor=fast_steps / slow_steps, name="fast")
    return [fast] * num_fast + [DeviceProfile(name="slow")] * num_slow


def mixed_fleet(fast_steps: int) -> list[DeviceProfile]:
    """Make ten nodes from fast to slow, every other one with a slow link."""
    return [
        DeviceProfile(
            compute_factor=fast_steps ** (1 - i / 9), uplink_mbps=mbps, downlink_mbps=mbps
        )
        for i, mbps in enumerate([100.0, 1.0] * 5)
    ]


def one_run(
    profiles: Sequence[DeviceProfile],
    samples: int,
    epochs: float = math.inf,
    budget_s: float = math.inf,
    **run_config: Any,
) -> dict[str, Any]:
    """Train for some epochs (of all nodes together) or some virtual time."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    config = {"num-server-rounds": 10**6, "partition": "iid", **run_config}
    settings = BiasedSettings.from_run_config(config)
    grid = LocalGrid(app, profiles, seed=settings.seed, run_config=config)
    progress = Progress(settings, grid, samples, epochs, budget_s)
    progress.start(
        grid, initial_arrays(settings), settings.num_server_rounds, evaluate_fn=progress.evaluate
    )
    last = progress.rounds[-1]
    return {
        "epochs": last["epochs"],
        "rounds": last["round"],
        "virtual_s": last["virtual_s"],
        "accuracy": last["accuracy"],
        "curve": progress.rounds,
    }
