"""Does scoring in the background lengthen a real round? SuperLink and SuperNodes on this machine.

Usage: ``PYTHONPATH=. python benchmarks/mercury/overlap.py [--rounds 12] [--mbps 4]``. The same
app runs twice on one fleet of two nodes behind slow links, with ``sampling = "free"`` and
``"bacc"``; adds a json line with both series of round times to ``overlap.jsonl``.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.faults.experiment import Experiment, durations
from flwr_hetero.fleet import RealFleet, named_fleet

HERE = Path(__file__).parent
APP = HERE.parents[1] / "apps" / "mercury"


def measure(fleet: RealFleet, folder: Path, sampling: str, rounds: int) -> dict:
    """Run the app once; returns seconds per round and the last round's metrics."""
    run = Experiment(
        fleet, folder / sampling, APP, num_server_rounds=rounds, sampling=sampling,
        local_steps=20, partition="iid",
    )  # fmt: skip
    history = run.start().finish(timeout_s=60.0 * rounds)
    if not history or history[-1]["round"] != rounds:
        raise RuntimeError(run.tail())
    times = durations(history)
    return {
        "rounds_s": [round(times[number], 3) for number in sorted(times) if number > 1],
        "median_s": round(statistics.median(s for n, s in times.items() if n > 1), 3),
        "failures": sum(len(record["failures"]) for record in history),
        "train": history[-1]["train"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--mbps", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        devices = folder / "devices.toml"
        devices.write_text(
            f"[[device]]\nuplink-mbps = {options.mbps}\ndownlink-mbps = {options.mbps}\n"
        )
        fleet = RealFleet(folder / "fleet")
        fleet.up(named_fleet(str(devices), 2))
        try:
            kinds = ("free", "bacc")
            found = {kind: measure(fleet, folder, kind, options.rounds) for kind in kinds}
        finally:
            fleet.down()
    leftovers = [str(path) for path in Path(tempfile.gettempdir()).glob("flwr-hetero-scoring-*")]
    ratio = found["bacc"]["median_s"] / found["free"]["median_s"]
    line = {"mbps": options.mbps, "ratio": round(ratio, 4), "leftovers": leftovers, **found}
    print(json.dumps(line, indent=1))
    with (HERE / "overlap.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
