"""The emulated fleet's round time against that of a real fleet with the same CPU shares.

Three SuperNodes with 0.4, 0.2 and 0.1 of a CPU (so that all together fit into one core and the
shares hold), one node a round (TiFL, three tiers of one). What an emulated device knows is its
compute time. What it does not know, and what is a constant of the deployment, is Flower's polling
and the start of a new ClientApp process for each message, which a slow device also does slowly:
it is measured per device by the same run without work, and added.

Usage: ``python -m benchmarks.faults.prediction [--work 1.0] [--rounds 12]``; writes
``prediction.jsonl`` beside this file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from benchmarks.faults.experiment import TOY_APP, Experiment, durations
from benchmarks.faults.scenarios import QUICK
from flwr_hetero.fleet import DeviceProfile, LocalGrid, RealFleet

HERE = Path(__file__).parent
SHARES = {"node-0": 0.4, "node-1": 0.2, "node-2": 0.1}
SETTINGS = {"clients_per_round": 1, "num_tiers": 3, "seed": 1}
EXAMPLES = 100
"""What a node of the toy app says it has worked on."""


def by_node(history: list[dict[str, Any]], seconds: dict[int, float]) -> dict[str, list[float]]:
    """Sort the lengths of rounds by the one node that trained in each."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in history[1:]:
        found[record["selected"][0]].append(seconds[record["round"]])
    return found


def real(fleet: RealFleet, folder: Path, work: float, rounds: int) -> list[dict[str, Any]]:
    """Run the toy app on real SuperNodes."""
    config = {"num_server_rounds": rounds, "work": work, "timeout": 300.0}
    run = Experiment(fleet, folder, **SETTINGS, **config)
    history = run.start().finish(timeout_s=900)
    if run.round() != rounds:
        sys.exit(run.tail())
    return history


def emulated(work: float, rounds: int) -> dict[str, float]:
    """Run the same app and strategy on an emulated fleet; nobody burns any time."""
    sys.path.insert(0, str(TOY_APP))
    from toy_app import client_app, server_app  # type: ignore[import-not-found]

    profiles = [
        DeviceProfile(share, seconds_per_example=work / EXAMPLES) for share in SHARES.values()
    ]
    config = {key.replace("_", "-"): value for key, value in SETTINGS.items()}
    config |= {"max-failures": 3, "faults": "", "work": 0.0}
    grid = LocalGrid(client_app.app, profiles, run_config=config)
    strategy, records = server_app.strategy_for(config), []
    strategy.on_round_end = lambda run, record: records.append(record)
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(server_app.SIZE, np.float32))}), rounds)
    times = {r["round"]: r["virtual_s"] - b["virtual_s"] for b, r in pairwise(records)}
    return {node: statistics.median(s) for node, s in by_node(records, times).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=float, default=1.0, help="CPU seconds per message")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    predicted = emulated(options.work, 60)
    with tempfile.TemporaryDirectory() as name:
        fleet = RealFleet(Path(name) / "fleet", QUICK)
        fleet.up([DeviceProfile(share) for share in SHARES.values()], cpu=max(SHARES.values()))
        try:
            idle = real(fleet, Path(name) / "idle", 0.0, options.rounds)
            busy = real(fleet, Path(name) / "busy", options.work, options.rounds)
        finally:
            fleet.down()
    constant, measured = by_node(idle, durations(idle)), by_node(busy, durations(busy))
    lines = []
    for node, share in SHARES.items():
        own = [r["latency"][node] for r in busy[1:] if node in r["latency"]]
        if not (constant.get(node) and measured.get(node)):
            continue
        lines.append(
            {
                "node": node,
                "cpu": share,
                "work_cpu_s": options.work,
                "emulated_s": round(predicted[node], 2),
                "reported_s": round(statistics.median(own), 2),
                "constant_s": round(statistics.median(constant[node]), 2),
                "constant_all_s": [round(s, 1) for s in constant[node]],
                "round_s": round(statistics.median(measured[node]), 2),
                "round_all_s": [round(s, 1) for s in measured[node]],
                "cores": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
                "flwr": version("flwr"),
            }
        )
    (HERE / "prediction.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
