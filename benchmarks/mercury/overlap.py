"""Does scoring in the background lengthen a real round? SuperLink and SuperNodes on this machine.

Usage: ``PYTHONPATH=. python benchmarks/mercury/overlap.py [--rounds 12] [--mbps 4]``. The same
app runs on one fleet of two nodes behind slow links, with ``sampling = "free"`` and ``"bacc"`` in
turns; adds a json line with both series of round times to ``overlap.jsonl``.
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
    """Run the app once; returns seconds per round and the last round's facts."""
    folder.mkdir(exist_ok=True)
    run = Experiment(
        fleet, folder / sampling, APP, num_server_rounds=rounds, sampling=sampling,
        local_steps=20, partition="iid",
    )  # fmt: skip
    history = run.start().finish(timeout_s=120.0 * (rounds + 2))
    if not history or history[-1]["round"] != rounds:
        raise RuntimeError(run.tail())
    times = durations(history)
    return {
        "rounds_s": [round(times[number], 3) for number in sorted(times) if number > 1],
        "failures": sum(len(record["failures"]) for record in history),
        "scored": history[-1]["sampler"].get("coverage"),
        "mean_age": history[-1]["sampler"].get("mean-age"),
    }


def pooled(runs: list[dict]) -> dict:
    """Put the rounds of several runs together."""
    rounds_s = [seconds for run in runs for seconds in run["rounds_s"]]
    return {
        "median_s": round(statistics.median(rounds_s), 3),
        "quartiles_s": [round(q, 3) for q in statistics.quantiles(rounds_s, n=4)[::2]],
        "failures": sum(run["failures"] for run in runs),
        "scored": runs[-1]["scored"],
        "mean_age": runs[-1]["mean_age"],
        "rounds_s": rounds_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--mbps", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=2)
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
            runs: dict[str, list[dict]] = {"free": [], "bacc": []}
            for number in range(options.repeats):
                for kind, found in runs.items():
                    found.append(measure(fleet, folder / str(number), kind, options.rounds))
        finally:
            fleet.down()
    leftovers = [str(path) for path in Path(tempfile.gettempdir()).glob("flwr-hetero-scoring-*")]
    found = {kind: pooled(of_kind) for kind, of_kind in runs.items()}
    ratio = found["bacc"]["median_s"] / found["free"]["median_s"]
    line = {"mbps": options.mbps, "ratio": round(ratio, 4), "leftovers": leftovers, **found}
    print(json.dumps(line, indent=1))
    with (HERE / "overlap.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
