"""Estimated against actual training time: Eq. 6 and the exact expectation.

The four policies of the paper's Table 2 on its fleet (50 nodes, five groups, 5 nodes a round),
with more and more jitter of the devices. Credits draw the tiers in exact proportion to the
policy, so that what is left is the estimates' own error; without them chance alone moves the
time of 500 uniform rounds by 6 % (standard error). Nobody trains.
Usage: ``python benchmarks/tifl/time_estimate.py [--rounds 1000]``; appends to
``time_estimate.jsonl`` beside this file, a json line per policy, jitter and seed.
"""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from order_statistics import NODES, PER_ROUND, make_idle_app

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import policy_probs
from flwr_hetero.tifl.time_estimate import mape, paper_estimate

HERE = Path(__file__).parent
CREDITS = {
    "slow": None,
    "uniform": [1, 1, 1, 1, 1],
    "random": [14, 2, 2, 1, 1],
    "fast": None,
}
"""Policy to credits in the proportion of its chances; a policy of one tier needs none."""


def compare(
    policy: str, jitter: float, rounds: int, seed: int, sync_rounds: int
) -> dict[str, object]:
    fleet = [replace(device, jitter=jitter) for device in named_fleet("paper-5", NODES)]
    grid = LocalGrid(make_idle_app(), fleet, seed=seed)
    strategy = TiFL(
        clients_per_round=PER_ROUND,
        policy=policy,
        credits=CREDITS[policy],
        sync_rounds=sync_rounds,
        warmup_rounds=0,
        seed=seed,
    )
    strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=rounds)
    measured = strategy.estimate.state()
    probs = policy_probs(policy, len(measured["typical"]))
    paper_s = paper_estimate(measured["typical"], probs, rounds)
    exact_s = paper_estimate(measured["slowest"], probs, rounds)
    actual_s = strategy.estimate.actual_s
    return {
        "policy": policy,
        "jitter": jitter,
        "seed": seed,
        "rounds": rounds,
        "sync_rounds": sync_rounds,
        "paper_s": paper_s,
        "exact_s": exact_s,
        "actual_s": actual_s,
        "paper_mape": mape(paper_s, actual_s),
        "exact_mape": mape(exact_s, actual_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sync-rounds", type=int, default=5)
    parser.add_argument("--jitters", type=float, nargs="+", default=[0.0, 0.03, 0.1])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with (HERE / "time_estimate.jsonl").open("a", encoding="utf-8") as results:
        for jitter in options.jitters:
            for policy in CREDITS:
                for seed in range(options.seeds):
                    line = compare(policy, jitter, options.rounds, seed, options.sync_rounds)
                    print(json.dumps(line), file=results, flush=True)
                    print(
                        "{policy:8} {jitter:g} {paper_mape:6.2f} {exact_mape:6.2f}".format(**line)
                    )


if __name__ == "__main__":
    main()
