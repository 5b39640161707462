"""Runs of ``apps/fleet`` on real nodes that are slowed down, and their lines of the record."""

import os
import signal
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero.report.history import MODEL, PARTS
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.curves import Columns, columns, rounded, time_to
from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.faults.fleet_run import FleetRun, History
from flwr_hetero_studies.race.network import accuracies

APP = Path(__file__).parents[2] / "apps" / "fleet"
SPEEDS = (1.0, 0.63, 0.4, 0.25, 0.16, 0.1)
"""Speeds of the SuperNodes, in about equal ratios."""
BASE = "FedAvg"
METHODS: dict[str, dict[str, Any]] = {
    BASE: {"engine": "rounds", "steps": "epochs"},
    "FedSlice": {},
    "TiFL": {"engine": "rounds", "selection": "tifl", "steps": "epochs",
             "num-tiers": 3, "clients-per-round": 2},
}  # fmt: skip
"""What each sets in the run-config of ``apps/fleet``. All nodes are in flight, except in TiFL."""
CLASSES = {"partition": "classes", "classes-per-node": 5}
"""Each of six nodes has five of ten classes, and all have the same number of examples."""
ENDLESS = 100_000
LATE = 1.2
"""The other methods end after so many times FedAvg's seconds."""
LESS = 0.01
"""The target is FedAvg's end minus this."""
EARLY = 2
"""First messages of a node, which may take longer because it loads modules and data."""
LONGEST_S = 2 * 3600.0
"""A run that takes longer is ended."""
Found = dict[str, Any]


@dataclass(frozen=True)
class RealTask:
    """First rows of a folder in ``--data``, a model, and FedAvg's learning rate and rounds.

    ``cpu``: the share of a core that the quickest node has.
    """

    folder: str
    train: int
    test: int
    model: str
    rate: float
    rounds: int
    cpu: float

    def dataset(self, data: Data) -> str:
        # Digits need no folder, and show whether everything works.
        if data.source == DIGITS:
            return DIGITS
        folder = Path(data.source).expanduser() / self.folder
        if not folder.is_dir():
            raise NotHereError(f"--data {data.source}: there is no folder {self.folder} in it")
        return Data(str(folder), data.scratch).first(self.train, self.test)

    def run_config(self, method: str, dataset: str, seed: int, rounds: int) -> dict[str, Any]:
        """Return the run-config of ``apps/fleet``; only FedAvg has a fixed number of rounds."""
        model = "auto" if dataset == DIGITS else self.model
        config = {"dataset": dataset, "model": model, "learning-rate": self.rate, "seed": seed}
        config |= {"num-server-rounds": rounds if method == BASE else ENDLESS, "fleet": "real"}
        return config | CLASSES | METHODS[method]


LARGE = "flwr_hetero_studies.real.network:large_cnn"
WORKLOADS = {
    "light": RealTask("fashion_mnist", 12_000, 1000, "cnn", 0.1, 30, cpu=0.6),
    # Two threads of one core are slower if both are busy, and nodes that compute all the time need
    # both: with a share of 0.6, the quickest node was 4.7 instead of 10 times as fast as the last.
    "heavy": RealTask("cifar10", 20_000, 1000, LARGE, 0.025, 4, cpu=0.4),
}


def race(
    case: Case,
    seed: int,
    data: Data,
    folder: Path,
    target: float | None = None,
    budget_s: float = inf,
) -> Found:
    """Run the app on a fleet of its own; return the metrics and the curve of its line."""
    workload = WORKLOADS[case["experiment"]]
    config = workload.run_config(case["name"], workload.dataset(data), seed, case["rounds"])
    if target is not None:
        config |= {"target-accuracy": target, "time-budget-s": budget_s}
    load = round(os.getloadavg()[0], 2)
    end_fleet_on_sigterm()
    fleet = RealFleet(folder / "fleet")
    fleet.up([DeviceProfile(speed) for speed in SPEEDS], cpu=workload.cpu)
    try:
        run = FleetRun(fleet, folder / "run", APP, **config).start()
        history = run.finish(LONGEST_S)
    finally:
        fleet.down()
    last = history[-1] if history else {"round": -1}
    if last["round"] < config["num-server-rounds"] and "stopped" not in last:
        raise RuntimeError(f"the run did not come to its end:\n{run.tail()}")
    found = found_in(history, target)
    ends = ended(load_file(folder / "run" / MODEL), config)
    return found | {"metrics": found["metrics"] | ends | {"load": load}}


def end_fleet_on_sigterm() -> None:
    """Let a process that is terminated still end its fleet."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def ended(model: dict[str, Any], config: dict[str, Any]) -> Found:
    """Return a model's accuracy, and that with classes weighted as the slowest node holds them."""
    settings = tasks.Settings.shared_part(config)
    test = tasks.load_test(settings.dataset, settings.task)
    count = len(SPEEDS)
    slowest = tasks.load_partition(settings.dataset, count - 1, count, **settings.partitioning)
    state = {name: torch.from_numpy(array) for name, array in model.items()}
    network = tasks.model_from(state, settings.model, *settings.shape).eval()
    with torch.inference_mode():
        logits = network(test.inputs).numpy()
    end, end_slow = accuracies(logits, test.targets.numpy(), slowest.targets.numpy())
    return {"end": round(end, 4), "end_slow": round(end_slow, 4)}


def found_in(history: History, target: float | None) -> Found:
    """Return the metrics and the curve of a run; without a target the run itself sets it."""
    curve = curve_of(history)
    metrics = counts_of(history) | {"nodes": messages_of(history)}
    return {"metrics": metrics | reached(curve, target), "curve": curve}


def counts_of(history: History) -> Found:
    failures = sum(len(line["failures"]) for line in history)
    replies = sum(len(line["selected"]) for line in history) - failures
    return {"replies": replies, "failures": failures}


def curve_of(history: History) -> Columns:
    """Return a point for each measured model: seconds, accuracy, and bytes both ways so far."""
    points = []
    sent = 0
    for line in history:
        sent += line["bytes_down"] + line["bytes_up"]
        if line["global"]:
            accuracy = line["global"]["accuracy"]
            points.append({"seconds": line["wall_s"], "accuracy": accuracy, "bytes": sent})
    return rounded(columns(points), 3)


def reached(curve: Columns, target: float | None) -> Found:
    """Return a target and the seconds to it, between two points by a straight line.

    The target is reached when the next point is at the target as well. For FedAvg, which sets the
    target, the last point is enough.
    """
    values = curve["accuracy"]
    confirmed = [*np.minimum(values[:-1], values[1:])]
    if target is None:
        target = round(values[-1] - LESS, 3)
        confirmed.append(values[-1])
    seconds = time_to(curve["seconds"][: len(confirmed)], confirmed, target)
    # JSON has no infinity.
    return {"target": target, "target_s": None if seconds == inf else round(seconds, 1)}


def messages_of(history: History) -> dict[str, dict[str, Any]]:
    """Return each node's seconds of its first messages and of a usual message.

    The usual seconds, in all and to train, are medians over the later half of its messages.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for line in history:
        parts = line.get("seconds", {})
        for node, train_s in parts.get("train", {}).items():
            # The time of the steps is a part of training.
            message_s = sum(parts.get(part, {}).get(node, 0.0) for part in PARTS)
            found.setdefault(node, []).append((message_s, train_s))
    nodes: dict[str, dict[str, Any]] = {}
    for node, times in sorted(found.items()):
        message_s, train_s = (median(part) for part in zip(*times[len(times) // 2 :], strict=True))
        nodes[node] = {
            "first_s": [round(seconds, 2) for seconds, _ in times[:EARLY]],
            "message_s": round(message_s, 2),
            "train_s": round(train_s, 2),
        }
    return nodes
