"""The race on twenty real nodes that imitate devices of unequal speed by waiting."""

import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile, LocalGrid, RealFleet, named_fleet
from flwr_hetero.fleet.supernode import FLOWERS_IDLE_S
from flwr_hetero.report.history import MODEL, PARTS
from flwr_hetero_studies.advise.advice import ROUNDS as ADVISED_ROUNDS
from flwr_hetero_studies.advise.advice import ROUNDS_S, advise
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.core.plan import Data
from flwr_hetero_studies.faults.fleet_run import FleetRun, History
from flwr_hetero_studies.race.node import NUMPY, Learning, deal
from flwr_hetero_studies.real.race import LESS, LONGEST_S, Found, curve_of, reached
from flwr_hetero_studies.real.workloads import BASE, ENDLESS

WAITING, EMULATED = "waiting", "waiting, emulated"
"""The names of the experiments. A trial has all methods."""
APP = Path(__file__).parent / "waiting_app"
NODES = 20
AT_WORK = 5
PACE = "paper-5"
"""Five groups of four devices. The fastest is 40 times as fast as the slowest."""
SLOWEST = range(NODES - NODES // 5, NODES)
"""Partitions of the slowest group."""
ROUNDS = 20
"""Rounds of FedAvg."""
DRAWS = 10
"""Emulated runs for each real one, with other draws of the nodes and other first models."""
MODEL_MB = 0.32
LAST = 5
"""The target is the median of so many of FedAvg's last measurements, less a point."""
LATE = 1.2
"""The other methods end after so many times FedAvg's seconds."""
ROWS = (6000, 0, 1000)
"""Images to train on, to tune with, and to test on."""
ALLOWED = {BASE: 1, "FedSlice": 3}
"""Rounds that a method may take, as a multiple of FedAvg's. Others go on until they are stopped."""
METHODS = (BASE, "FedSlice", "FedBuff", "TiFL")
ADVISED = {"FedSlice": "FedSlice, few in flight", "TiFL": "TiFL"}
"""Settings of ``advise`` that are those of a method here."""


def run(data: Data, seed: int, rounds: int, folder: Path) -> Found:
    """Run all methods on one fleet of warm nodes; ask for advice by the first run's history."""
    load = round(os.getloadavg()[0], 2)
    # If this process is terminated, it still ends its fleet.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    learning = Learning(dataset_of(data), NUMPY, "dirichlet", NODES, ROWS, seed)
    write_data(learning, folder)
    fleet = RealFleet(folder / "fleet")
    # The nodes wait by themselves, so that no process needs to be slowed down.
    fleet.up(NODES)
    found: dict[str, Found] = {}
    message_s = 0.0
    try:
        for method in METHODS:
            config = run_config(method, folder, seed, rounds) | limits_of(found)
            process = FleetRun(fleet, folder / method, APP, **config).start()
            history = process.finish(LONGEST_S)
            if not history or history[-1]["round"] < min(rounds, 2):
                raise RuntimeError(f"the run did not come to its end:\n{process.tail()}")
            found[method] = found_in(history, found)
            if method == BASE:
                message_s = round(message_cost(history), 3)
            model = list(load_file(folder / method / MODEL).values())
            found[method] |= ends_of(learning, model)
    finally:
        fleet.down()
    advised = advise(
        str(folder / BASE),
        clients_per_round=AT_WORK,
        examples=ROWS[0] // NODES,
        model_mb=MODEL_MB,
        # As many rounds of FedAvg as here.
        seconds=ROUNDS_S * rounds / ADVISED_ROUNDS,
    )
    speedups = {
        method: {task: row.speedup for task, row in advised.rows_of(name).items()}
        for method, name in ADVISED.items()
    }
    metrics = {"load": load, "message_s": message_s, "advised": speedups}
    return {"metrics": metrics | {"found": found}}


def run_emulated(data: Data, seed: int, rounds: int, message_s: float, folder: Path) -> Found:
    """Run all methods on the same data on emulated devices, with several draws of the nodes."""
    learning = Learning(dataset_of(data), NUMPY, "dirichlet", NODES, ROWS, seed)
    write_data(learning, folder)
    devices = polling(named_fleet(PACE, NODES), message_s)
    target_s: dict[str, list[float | None]] = {method: [] for method in METHODS}
    for draw in range(DRAWS):
        found: dict[str, Found] = {}
        for method in METHODS:
            config = run_config(method, folder, DRAWS * seed + draw, rounds) | {"pace": ""}
            found[method] = found_in(emulate(config | limits_of(found), devices), found)
            target_s[method].append(found[method]["target_s"])
    return {"metrics": {"target_s": target_s}}


def polling(devices: Sequence[DeviceProfile], message_s: float) -> list[DeviceProfile]:
    """Return devices whose messages cost so many seconds on average, with the wait for a poll."""
    poll_s = min(FLOWERS_IDLE_S, 2 * message_s)
    return [replace(each, wait_s=message_s - poll_s / 2, poll_s=poll_s) for each in devices]


def dataset_of(data: Data) -> str:
    folder = Path(data.source).expanduser() / "fashion_mnist"
    return str(folder) if folder.is_dir() else data.source


def write_data(learning: Learning, folder: Path) -> None:
    """Write all examples, and the rows of each node, for the nodes to read."""
    splits = learning.splits
    count = len(splits["train"])
    inputs, labels = (
        np.concatenate([getattr(splits[name], part) for name in ("train", "test")])
        for part in ("inputs", "labels")
    )
    rows = {f"rows-{node}": part for node, part in enumerate(deal(learning))}
    rows["rows-test"] = np.arange(count, len(labels))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "waiting.npz", inputs=inputs.astype(np.float16), labels=labels, **rows)


def run_config(method: str, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    config = {"method": method, "seed": seed, "data": str(folder), "at-work": AT_WORK}
    return config | {"num-server-rounds": rounds * ALLOWED.get(method, ENDLESS)}


def limits_of(found: dict[str, Found]) -> dict[str, Any]:
    """Return when a run ends, by what was found of FedAvg, which itself ends with its rounds."""
    if BASE not in found:
        return {}
    base = found[BASE]
    budget_s = round(LATE * base["curve"]["seconds"][-1], 1)
    return {"target-accuracy": base["target"], "budget-s": budget_s}


def found_in(history: History, found: dict[str, Found]) -> Found:
    """Return what a run took to the target, which the first run, FedAvg's, sets."""
    curve = curve_of([(line, line["wall_s"]) for line in history])
    if BASE in found:
        target = found[BASE]["target"]
    else:
        target = round(median(curve["accuracy"][-LAST:]) - LESS, 3)
    failures = sum(len(line["failures"]) for line in history)
    replies = sum(len(line["selected"]) for line in history) - failures
    counts = {"replies": replies, "failures": failures, "bytes": curve["bytes"][-1]}
    return reached(curve, target) | counts | {"curve": curve}


def emulate(config: dict[str, Any], devices: list[DeviceProfile]) -> History:
    """Run the app on emulated devices; return the history, by their clock."""
    sys.path.insert(0, str(APP))
    server = import_module("waiting_app.server_app")
    config = app_config() | config
    seed = config["seed"]
    grid = LocalGrid(
        import_module("waiting_app.client_app").app, devices, seed=seed, run_config=config
    )
    lines: History = []

    def note(moment: Moment) -> None:
        lines.append(dict(moment.record) | {"wall_s": moment.virtual_s})
        accuracies = [line["global"]["accuracy"] for line in lines[-2:]]
        is_there = len(accuracies) == 2 and min(accuracies) >= config["target-accuracy"]
        if is_there or moment.virtual_s > config["budget-s"]:
            raise Enough

    drive(
        server.make_strategy(config["method"], config["at-work"], seed),
        grid,
        server.first_arrays(config),
        note,
        seed=seed,
        rounds=config["num-server-rounds"],
        evaluate_fn=server.central_evaluate(config["data"]),
    )
    return lines


def app_config() -> dict[str, Any]:
    """Return the app's settings, as its pyproject.toml has them."""
    with (APP / "pyproject.toml").open("rb") as file:
        settings: dict[str, Any] = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    return settings


def ends_of(learning: Learning, model: list[Any]) -> Found:
    named = {str(number): array for number, array in enumerate(model)}
    end, end_slow = learning.measure(named, list(SLOWEST))
    return {"end": round(end, 4), "end_slow": round(end_slow, 4)}


def message_cost(history: History) -> float:
    """Return the mean seconds of a message besides the training."""
    parts = [line["seconds"] for line in history if "seconds" in line]
    return fmean(
        sum(own[part].get(node, 0.0) for part in PARTS if part != "train" and part in own)
        for own in parts
        for node in own["train"]
    )
