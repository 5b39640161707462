"""Which setting of TiFL reaches vanilla's accuracy soonest: digits on an uneven fleet.

As ``apps/tifl`` by default: 20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1, scikit-learn's digits
dealt by Dirichlet(0.5), 3 nodes and one local epoch a round, one profiling round (an emulated
device without jitter has no cold start and is always the same). Vanilla trains for a fixed
number of rounds; every other setting may use half of vanilla's virtual time.
Usage: ``python benchmarks/tifl/digits.py [--rounds 60] [--seeds 0 1 2]``; appends to
``digits.jsonl`` beside this file, a json line per setting and seed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from one_run import one_run

from flwr_hetero.client.device import named_fleet

HERE = Path(__file__).parent
NODES, PER_ROUND = 20, 3
PROFILING = {"sync_rounds": 1, "warmup_rounds": 0}
SHARE = 0.5
"""Of vanilla's time, for the others."""
MORE_ROUNDS = 6
"""Times vanilla's rounds that the others may take in that time, unless credits depend on it."""

SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"policy": "uniform"},
    "random": {"policy": "random"},
    "fast": {"policy": "fast"},
    "fast3": {"policy": "fast3"},
    "adaptive": {"policy": "adaptive", "credits": None},
    "adaptive, equal credits": {"policy": "adaptive", "credits": "equal", "times": 1},
    "adaptive, geometric credits": {"policy": "adaptive", "credits": "geometric", "times": 3},
    "adaptive, paced credits": {"policy": "adaptive", "credits": "paced"},
    "adaptive, paced credits, from fast3": {
        "policy": "adaptive",
        "credits": "paced",
        "start_policy": "fast3",
    },
}
"""Name to arguments of TiFL; ``times`` vanilla's rounds is the length of the run."""


def run(
    name: str, arguments: dict[str, Any], rounds: int, seed: int, **more: Any
) -> dict[str, Any]:
    run_config = {"num-server-rounds": rounds, "seed": seed}
    fleet = named_fleet("paper-5", NODES)
    arguments = {"clients_per_round": PER_ROUND, **PROFILING, **arguments}
    result = one_run(run_config, fleet, **arguments, **more)
    return {"setting": name, "rounds": rounds, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    with (HERE / "digits.jsonl").open("a", encoding="utf-8") as results:
        for seed in options.seeds:
            vanilla = run("vanilla", {"policy": "vanilla"}, options.rounds, seed)
            print(json.dumps(vanilla), file=results, flush=True)
            budget_s = SHARE * vanilla["clock_s"][-1]
            for name in options.settings:
                arguments = dict(SETTINGS[name])
                rounds = arguments.pop("times", MORE_ROUNDS) * options.rounds
                line = run(name, arguments, rounds, seed, budget_s=budget_s)
                print(json.dumps(line), file=results, flush=True)
                print(seed, name, line["accuracy"][-1], f"{line['clock_s'][-1]:.0f} s")


if __name__ == "__main__":
    main()
