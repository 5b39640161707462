"""A run of ``apps/fleet`` on a real fleet, and what its line keeps."""

import os
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from flwr_hetero.fleet import DeviceProfile, RealFleet
from flwr_hetero_studies.core.apps import APPS
from flwr_hetero_studies.core.curves import Columns, columns, rounded, time_to
from flwr_hetero_studies.faults.fleet_run import FleetRun, History
from flwr_hetero_studies.real.workloads import CPU

LESS = 0.01
"""By which the target is below FedAvg's end."""
LONGEST_S = 2 * 3600.0
"""After which a run is broken off."""
Found = dict[str, Any]


def race(
    folder: Path, profiles: Sequence[DeviceProfile], warm: bool, config: dict[str, Any]
) -> Found:
    """Run the app on a fleet of its own; return the metrics and the curve of its line."""
    load = round(os.getloadavg()[0], 2)
    fleet = RealFleet(folder / "fleet")
    fleet.up(profiles, cpu=CPU, warm=warm)
    try:
        run = FleetRun(fleet, folder / "run", APPS / "fleet", **config).start()
        history = run.finish(LONGEST_S)
    finally:
        fleet.down()
    last = history[-1] if history else {"round": -1}
    if last["round"] < config["num-server-rounds"] and "stopped" not in last:
        raise RuntimeError(f"the run did not come to its end:\n{run.tail()}")
    found = found_in(history, config.get("target-accuracy"))
    return found | {"metrics": found["metrics"] | {"load": load}}


def found_in(history: History, target: float | None) -> Found:
    """Return what a line keeps of a run; without a target the run itself sets it."""
    curve = curve_of([(line, line["wall_s"]) for line in history])
    failures = sum(len(line["failures"]) for line in history)
    replies = sum(len(line["selected"]) for line in history) - failures
    metrics: Found = {"replies": replies, "failures": failures, "nodes": messages_of(history)}
    return {"metrics": metrics | reached(curve, target), "curve": curve}


def curve_of(lines: Sequence[tuple[dict[str, Any], float]]) -> Columns:
    """Return a point for each measured model: seconds, accuracy, and bytes both ways so far."""
    points, sent = [], 0
    for line, seconds in lines:
        sent += line["bytes_down"] + line["bytes_up"]
        if line["global"]:
            accuracy = line["global"]["accuracy"]
            points.append({"seconds": seconds, "accuracy": accuracy, "bytes": sent})
    return rounded(columns(points), 3)


def reached(curve: Columns, target: float | None) -> Found:
    """Return a target and the seconds to it, between two points by a straight line."""
    aim = round(curve["accuracy"][-1] - LESS, 3) if target is None else target
    seconds = time_to(curve["seconds"], curve["accuracy"], aim)
    # JSON knows no infinity
    return {"target": aim, "target_s": None if seconds == inf else round(seconds, 1)}


def messages_of(history: History) -> dict[str, dict[str, float]]:
    """Return of each node the median seconds of a message, those to train, and of the first one."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in history:
        parts = line.get("seconds", {})
        for node, train_s in parts.get("train", {}).items():
            own = found.setdefault(node, {"message_s": [], "train_s": []})
            own["message_s"].append(sum(of_nodes.get(node, 0.0) for of_nodes in parts.values()))
            own["train_s"].append(train_s)
    medians = {}
    for node, own in sorted(found.items()):
        first_s, *later_s = own["message_s"]
        times = {"message_s": median(later_s or [first_s]), "first_s": first_s}
        times["train_s"] = median(own["train_s"][1:] or own["train_s"])
        medians[node] = {name: round(value, 2) for name, value in times.items()}
    return medians
