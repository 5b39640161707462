"""Faults done to real processes, a soak on an emulated fleet, and predicted round times.

``scenarios.py``, ``outages.py`` and ``storage.py`` have the faults, ``costs.py`` what each cost,
``soak.py`` the soak. ``prediction`` holds the round time of an
emulated fleet against that of a real one with the same CPU shares: three SuperNodes with 0.4, 0.2
and 0.1 of a CPU (so that all together fit into one core and the shares hold), one node a round.
What an emulated device does not know, and what is a constant of the deployment, is Flower's polling
and the start of a new ClientApp process for each message: it is measured per device by the same
run without work, and added.
"""

import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from flwr_hetero.fleet import DeviceProfile, LocalGrid, RealFleet
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.faults import costs, engines, influence, scenarios, soak
from flwr_hetero_studies.faults.experiment import TOY_APP, Experiment, durations

SETTINGS = {"rounds": 2000, "merges": 2000, "nodes": 1000, "work": 1.0, "messages": 12, "lies": 25,
            "checks": "on", "updates": 4}  # fmt: skip
"""Of the soaks; CPU seconds a message and rounds of the prediction; rounds among liars, and whether
this is the code with the checks of claims, or ("off") commit 05fb446, or ("before") the last one
without."""
FAST = {"rounds": 30, "merges": 30, "nodes": 120, "lies": 3}
FAST_CASES = ["soak/*", "influence/FedAvg: *"]
LIARS = {"no time": (1, 6)}
"""How many nodes lie, of 20; 1 where nothing is said."""
SHARES = {"node-0": 0.4, "node-1": 0.2, "node-2": 0.1}
TIERS = {"clients_per_round": 1, "num_tiers": 3, "seed": 1}
EXAMPLES = 100
"""What a node of the toy app reports as its work."""


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield all runs; real fleets are alone on the machine."""
    sizes = options.settings
    for name in (*costs.SCENARIOS, *costs.OUTAGES):
        yield Trial({"experiment": "process", "name": name}, alone=True)
    for name in soak.STRATEGIES:
        soaked = {"rounds": sizes[name], "nodes": sizes["nodes"]}
        yield Trial({"experiment": "soak", "name": name, **soaked}, alone=True)
    for wrapper in influence.WRAPPERS:
        for lie in influence.LIES:
            if lie == influence.LARGE_LOSS and wrapper not in influence.BY_LOSS:
                continue
            for seed in options.seeds_or(range(5 if lie == "honest" else 3)):
                for liars in LIARS.get(lie, (1,)):
                    case = {"experiment": "influence", "name": f"{wrapper}: {lie}", "liars": liars}
                    yield Trial(case | {"rounds": sizes["lies"], "checks": sizes["checks"]}, seed)
    case = {"experiment": "prediction", "name": "three CPU shares", "work": sizes["work"]}
    yield Trial(case | {"rounds": sizes["messages"]}, alone=True)
    case = {"experiment": "engines", "name": "six CPU shares", "work": sizes["work"]}
    yield Trial(case | {"rounds": sizes["updates"]}, alone=True)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Run a case of any kind."""
    if case["experiment"] == "soak":
        return soak.run(case["name"], case["rounds"], case["nodes"])
    if case["experiment"] == "influence":
        wrapper, _, lie = case["name"].partition(": ")
        return influence.run(wrapper, lie, case["liars"], case["rounds"], seed)
    load = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case["experiment"] == "process":
            return {"metrics": {"faults": costs.inject(case["name"], folder), **load}}
        if case["experiment"] == "engines":
            return {"metrics": engines.run(folder, case["work"], case["rounds"]) | load}
        return {"metrics": {"nodes": predict(folder, case["work"], case["rounds"]), **load}}


# --- the emulated fleet against real processes ----------------------------------------------


def by_node(history: list[dict[str, Any]], seconds: dict[int, float]) -> dict[str, list[float]]:
    """Sort the lengths of rounds by the one node that trained in each."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in history[1:]:
        found[record["selected"][0]].append(seconds[record["round"]])
    return found


def real(fleet: RealFleet, folder: Path, work: float, rounds: int) -> list[dict[str, Any]]:
    """Run the toy app on real SuperNodes."""
    config = {"num_server_rounds": rounds, "work": work, "timeout": 300.0}
    run = Experiment(fleet, folder, **TIERS, **config)
    history = run.start().finish(timeout_s=900)
    if run.round() != rounds:
        raise RuntimeError(run.tail())
    return history


def emulated(work: float, rounds: int) -> dict[str, float]:
    """Run the same app and strategy on an emulated fleet, without any work."""
    sys.path.insert(0, str(TOY_APP))
    from toy_app import client_app, server_app  # type: ignore[import-not-found]

    profiles = [
        DeviceProfile(share, seconds_per_example=work / EXAMPLES) for share in SHARES.values()
    ]
    config = {key.replace("_", "-"): value for key, value in TIERS.items()}
    config |= {"max-failures": 3, "faults": "", "work": 0.0}
    grid = LocalGrid(client_app.app, profiles, run_config=config)
    strategy, records = server_app.strategy_for(config), []
    strategy.on_round_end = lambda run, record: records.append(record)
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(server_app.SIZE, np.float32))}), rounds)
    times = {r["round"]: r["virtual_s"] - b["virtual_s"] for b, r in pairwise(records)}
    return {node: statistics.median(s) for node, s in by_node(records, times).items()}


def predict(folder: Path, work: float, rounds: int) -> list[dict[str, Any]]:
    """Return per device what the emulated fleet predicts and what the real one takes."""
    predicted = emulated(work, 60)
    fleet = RealFleet(folder / "fleet", scenarios.QUICK)
    fleet.up([DeviceProfile(share) for share in SHARES.values()], cpu=max(SHARES.values()))
    try:
        idle = real(fleet, folder / "idle", 0.0, rounds)
        busy = real(fleet, folder / "busy", work, rounds)
    finally:
        fleet.down()
    constant, measured = by_node(idle, durations(idle)), by_node(busy, durations(busy))
    return [
        {
            "node": node,
            "cpu": share,
            "emulated_s": round(predicted[node], 2),
            "reported_s": round(
                statistics.median(r["latency"][node] for r in busy[1:] if node in r["latency"]), 2
            ),
            "constant_s": round(statistics.median(constant[node]), 2),
            "constant_all_s": [round(s, 1) for s in constant[node]],
            "round_s": round(statistics.median(measured[node]), 2),
            "round_all_s": [round(s, 1) for s in measured[node]],
        }
        for node, share in SHARES.items()
        if constant.get(node) and measured.get(node)
    ]
