"""Rounds and merges on one real fleet, beside what the emulated fleet predicted of both.

Six SuperNodes are held at shares of a CPU that fit into one core together. What an emulated device
does not know, a constant per device, is measured first, by merges without any work.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file

from flwr_hetero.fleet import DeviceProfile, LocalGrid, RealFleet
from flwr_hetero_studies.faults.fleet_run import TOY_APP, FleetRun, History
from flwr_hetero_studies.faults.scenarios import QUICK, Found

SHARES = (0.3, 0.3, 0.15, 0.15, 0.075, 0.075)
EXAMPLES, IN_MERGE = 100, 3
"""What a node of the toy app reports as its work; updates of a merge, a round has all six."""
GOAL = statistics.mean(range(len(SHARES)))
"""Where the model belongs: at the mean of the nodes' own goals."""


def config_of(engine: str, rounds: int) -> Found:
    """Return the app's settings for so many updates of every node on average."""
    together = IN_MERGE if engine == "buffered" else len(SHARES)
    sizes = {"clients_per_round": together, "num_server_rounds": rounds * len(SHARES) // together}
    return {"engine": engine, "num_tiers": 1, "seed": 1, **sizes}


def run(folder: Path, work: float, rounds: int) -> Found:
    fleet, rows = RealFleet(folder / "fleet", QUICK), []
    fleet.up([DeviceProfile(share / max(SHARES)) for share in SHARES], cpu=max(SHARES), warm=False)
    try:
        # polling and the start of a ClientApp, which no emulation knows
        idle, _ = real(fleet, folder / "idle", "buffered", 0.0, rounds)
        constant_s = constants(idle)
        for engine in ("rounds", "buffered"):
            predicted, w = emulated(engine, work, rounds, constant_s)
            history, found_w = real(fleet, folder / engine, engine, work, rounds)
            real_s = history[-1]["wall_s"] - history[0]["wall_s"]
            row = {"engine": engine, "predicted_s": round(predicted, 1), "real_s": round(real_s, 1)}
            row["predicted_error"] = round(abs(w - GOAL), 3)
            row["real_error"] = round(abs(found_w - GOAL), 3)
            rows.append(row | {"failures": sum(len(each["failures"]) for each in history)})
    finally:
        fleet.down()
    return {"rows": rows, "constant_s": {k: round(v, 2) for k, v in constant_s.items()}}


def real(
    fleet: RealFleet, folder: Path, engine: str, work: float, rounds: int
) -> tuple[History, float]:
    config = config_of(engine, rounds) | {"work": work, "timeout": 300.0}
    history = FleetRun(fleet, folder, **config).start().finish()
    return history, float(load_file(folder / "model.safetensors")["w"][0])


def constants(history: History) -> dict[str, float]:
    """Return what a message without work takes on each node, from sending to arrival."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in history[1:]:
        for node, age_s in zip(line["fedbuff"]["nodes"], line["fedbuff"]["age_s"], strict=True):
            found[node].append(age_s)
    return {node: statistics.median(ages) for node, ages in sorted(found.items())}


def emulated(engine: str, work: float, rounds: int, idle_s: dict[str, float]) -> list[float]:
    """Return the seconds and the model of the same run on an emulated fleet."""
    sys.path.insert(0, str(TOY_APP))
    from toy_app import client_app, server_app  # type: ignore[import-not-found]

    # predicted before the real run is made
    seconds = [work / share + idle_s[f"node-{i}"] for i, share in enumerate(SHARES)]
    profiles = [DeviceProfile(seconds_per_example=each / EXAMPLES) for each in seconds]
    settings = config_of(engine, rounds)
    config = {key.replace("_", "-"): value for key, value in settings.items()}
    config |= {"faults": "", "work": 0.0}
    strategy, clock_s = server_app.strategy_for(config), []
    strategy.on_round_end = lambda run, line: clock_s.append(line["virtual_s"])
    start = ArrayRecord({"w": Array(np.zeros(server_app.SIZE, np.float32))})
    grid = LocalGrid(client_app.app, profiles, run_config=config)
    result = strategy.start(grid, start, settings["num_server_rounds"])
    return [clock_s[-1] - clock_s[0], float(result.arrays["w"].numpy()[0])]
