"""A run of ``apps/fleet`` on a real fleet, and its line of the record."""

import os
import signal
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.report.history import MODEL, PARTS
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.apps import APPS, app_modules
from flwr_hetero_studies.core.curves import Columns, columns, rounded, time_to
from flwr_hetero_studies.faults.fleet_run import FleetRun, History
from flwr_hetero_studies.race.network import accuracies
from flwr_hetero_studies.real.throttle import ThrottledFleet
from flwr_hetero_studies.real.workloads import SPEEDS

LESS = 0.01
"""The target is FedAvg's end minus this."""
EARLY = 2
"""First messages of a node, which may take longer because it loads modules and data."""
LONGEST_S = 2 * 3600.0
"""A run that takes longer is ended."""
Found = dict[str, Any]


def race(
    folder: Path, profiles: Sequence[DeviceProfile], cpu: float, warm: bool, config: dict[str, Any]
) -> Found:
    """Run the app on a fleet of its own; return the metrics and the curve of its line."""
    load = round(os.getloadavg()[0], 2)
    # If this process is terminated, it still ends its fleet.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    fleet = ThrottledFleet(folder / "fleet", profiles, cpu=cpu)
    fleet.start(warm=warm)
    try:
        run = FleetRun(fleet, folder / "run", APPS / "fleet", **config).start()
        history = run.finish(LONGEST_S)
    finally:
        fleet.down()
    last = history[-1] if history else {"round": -1}
    if last["round"] < config["num-server-rounds"] and "stopped" not in last:
        raise RuntimeError(f"the run did not come to its end:\n{run.tail()}")
    found = found_in(history, config.get("target-accuracy"))
    ends = ended(load_file(folder / "run" / MODEL), config)
    return found | {"metrics": found["metrics"] | ends | {"load": load}}


def ended(model: dict[str, Any], config: dict[str, Any]) -> Found:
    """Return a model's accuracy, and that with classes weighted as the slowest node holds them."""
    _, task = app_modules("fleet", "fleet_app")
    settings = task.FleetSettings.from_run_config(config)
    test = tasks.load_test(settings.dataset, settings.task)
    count = len(SPEEDS)
    slowest = tasks.load_partition(settings.dataset, count - 1, count, **settings.partitioning)
    network = tasks.model_from(
        {name: torch.from_numpy(array) for name, array in model.items()},
        settings.model, *settings.shape,
    )  # fmt: skip
    with torch.inference_mode():
        logits = network.eval()(test.inputs).numpy()
    end, end_slow = accuracies(logits, test.targets.numpy(), slowest.targets.numpy())
    return {"end": round(end, 4), "end_slow": round(end_slow, 4)}


def found_in(history: History, target: float | None) -> Found:
    """Return the metrics and the curve of a run; without a target the run itself sets it."""
    curve = curve_of([(line, line["wall_s"]) for line in history])
    failures = sum(len(line["failures"]) for line in history)
    replies = sum(len(line["selected"]) for line in history) - failures
    metrics: Found = {"replies": replies, "failures": failures, "nodes": messages_of(history)}
    return {"metrics": metrics | reached(curve, target), "curve": curve}


def curve_of(lines: Sequence[tuple[dict[str, Any], float]]) -> Columns:
    """Return a point for each measured model: seconds, accuracy, and bytes both ways so far."""
    points = []
    sent = 0
    for line, seconds in lines:
        sent += line["bytes_down"] + line["bytes_up"]
        if line["global"]:
            accuracy = line["global"]["accuracy"]
            points.append({"seconds": seconds, "accuracy": accuracy, "bytes": sent})
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
