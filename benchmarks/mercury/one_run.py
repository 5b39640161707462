"""One training run of ``apps/mercury`` on an emulated fleet, in this process."""

import logging
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.client.device import DeviceProfile, named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "apps" / "mercury"))
from mercury_app.client_app import app
from mercury_app.task import MercurySettings

CNN_BYTES = 4 * 20_490
KEPT = ("variance-ratio", "hidden-share")


class Curve(Wrapper):
    """Measure the global model every few rounds; note time, traffic and what the samplers do."""

    def __init__(self, settings: MercurySettings, every: int) -> None:
        super().__init__(settings.strategy())
        self.measure, self.every = central_evaluate(settings), every
        self.last, self.points = settings.num_server_rounds, []
        self.open_rounds = 0.0

    def evaluate(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Measure the model in rounds that are due."""
        due = number % self.every == 0 or number == self.last
        return self.measure(number, arrays) if due else None

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Add a point to the curve."""
        facts = record.get("sampler", {})
        self.open_rounds += facts.get("importance-open", 0.0)
        if record["global"]:
            point = {"round": record["round"], "virtual_s": record["virtual_s"]}
            point |= {key: round(value, 5) for key, value in record["global"].items()}
            point |= {key: round(facts[key], 4) for key in KEPT if key in facts}
            self.points.append(point)


@lru_cache(maxsize=4)
def subset(dataset: str, rows: int, test_rows: int) -> str:
    """Write the first rows of a Parquet data set to a folder; ``digits`` stays as it is."""
    if dataset == "digits":
        return dataset
    folder = Path(tempfile.mkdtemp(prefix="subset-"))
    for split, count in (("train", rows), ("test", test_rows)):
        table = pq.read_table(Path(dataset) / f"{split}.parquet")
        pq.write_table(table.slice(0, count), folder / f"{split}.parquet")
    return str(folder)


def columns(points: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Turn points into columns, which take a third of the room."""
    names = ("round", "virtual_s", "accuracy", "loss", *KEPT)
    found = {name: [point.get(name) for point in points] for name in names}
    found["virtual_s"] = [round(point["virtual_s"], 5) for point in points]
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def fleet(name: str, num_nodes: int, arrays: ArrayRecord) -> list[DeviceProfile]:
    """Make a fleet that computes and transfers in the paper's ratio, whatever the model's size.

    The named fleets have that ratio for the small CNN for 28x28 images.
    """
    size = sum(array.numpy().nbytes for array in arrays.values()) / CNN_BYTES
    return [
        replace(device, seconds_per_example=size * device.seconds_per_example)
        for device in named_fleet(name, num_nodes)
    ]


def one_run(num_nodes: int, every: int, **run_config: Any) -> dict[str, Any]:
    """Train for the rounds of the run-config; returns the curve and its end."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = MercurySettings.from_run_config(run_config)
    arrays = initial_arrays(settings)
    profiles = fleet(settings.fleet, num_nodes, arrays)
    grid = LocalGrid(app, profiles, seed=settings.seed, run_config=run_config)
    curve = Curve(settings, every)
    steps = {keys.NUM_STEPS: settings.local_steps} if settings.local_steps else {}
    curve.start(
        grid,
        arrays,
        settings.num_server_rounds,
        train_config=ConfigRecord(steps),
        evaluate_fn=curve.evaluate,
    )
    last = curve.points[-1]
    return {
        "rounds": last["round"],
        "virtual_s": round(last["virtual_s"], 4),
        "accuracy": last["accuracy"],
        "open": round(curve.open_rounds / settings.num_server_rounds, 3),
        "versions": {name: version(name) for name in ("flwr", "torch", "numpy")},
        "curve": columns(curve.points),
    }
