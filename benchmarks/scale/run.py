"""CPU time and memory per round of LocalGrid and strategies at 100, 1,000 and 10,000 nodes.

Usage: ``python benchmarks/scale/run.py [--nodes 100 1000 10000] [--rounds 100]``; each run is a
process of its own, and ``results.jsonl`` gets a json line per run. ``report.py`` does the rest.
"""

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
COHORT = 50
SELECTED = ("FedAvg", "TiFL", "TiFL(BiasedLocalSGD(CDGraB))")
EVERYBODY = ("FedAvg", "BiasedLocalSGD(CDGraB)")
FULL_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    jobs = [(nest, n, args.rounds, COHORT) for n in args.nodes for nest in SELECTED]
    jobs += [(nest, n, FULL_ROUNDS, 0) for n in args.nodes for nest in EVERYBODY]
    versions = {"flwr": version("flwr"), "numpy": version("numpy")}
    versions |= {"python": platform.python_version(), "machine": platform.machine()}
    with (HERE / "results.jsonl").open("w", encoding="utf-8") as file:
        for job in jobs:
            command = [sys.executable, str(HERE / "one_run.py"), *map(str, job)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            line = json.loads(done.stdout) | versions
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(*job, f"{line['round_s']:.3f} s a round", flush=True)


if __name__ == "__main__":
    main()
