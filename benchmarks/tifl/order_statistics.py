"""Static policies on an emulated fleet against what order statistics say.

The paper's fleet: 50 nodes in five groups with CPU shares 4, 2, 1, 0.5 and 0.1, latency
1 / share, no jitter, 5 nodes a round. Nobody trains; profiling, selection, messages and clock
are those of any other run.
Usage: ``python benchmarks/tifl/order_statistics.py [--error 0.01]``; appends to
``order_statistics.jsonl`` beside this file, a json line per policy.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import STATIC_POLICIES, VANILLA, policy_probs
from flwr_hetero.tifl.time_estimate import expected_round_time, mape

HERE = Path(__file__).parent
NODES, PER_ROUND = 50, 5
EXAMPLES_PER_SECOND = 100
"""Of the reference device: a node's latency is 1 / CPU share seconds."""


def make_idle_app() -> ClientApp:
    """Make nodes that report the work of one epoch and send the model back as it came."""
    app = ClientApp()

    def answer(message: Message, context: object) -> Message:
        metrics = MetricRecord({keys.NUM_EXAMPLES: EXAMPLES_PER_SECOND})
        arrays = message.content.array_records["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    app.train()(answer)
    app.train("profile")(answer)
    return app


def training_time_s(policy: str, rounds: int, seed: int) -> float:
    """Run a policy and return the virtual time of its training rounds."""
    grid = LocalGrid(make_idle_app(), named_fleet("paper-5", NODES), seed=seed)
    strategy = TiFL(clients_per_round=PER_ROUND, policy=policy, warmup_rounds=0, seed=seed)
    strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=rounds)
    return strategy.estimate.actual_s


def round_moments(policy: str) -> tuple[float, float]:
    """Return mean and standard deviation of a round by order statistics, in seconds."""
    latency = np.array([1 / device.compute_factor for device in named_fleet("paper-5", NODES)])
    num_tiers = 1 if policy == VANILLA else 5
    tier, probs = np.arange(NODES) * num_tiers // NODES, policy_probs(policy, num_tiers)
    mean, square = (
        expected_round_time(power, tier, probs, PER_ROUND) for power in (latency, latency**2)
    )
    return mean, float(np.sqrt(max(square - mean**2, 0.0)))


def compare(policy: str, error: float, seeds: Sequence[int]) -> dict[str, object]:
    """Run as many rounds as it takes for a standard error of the mean round of ``error``."""
    exact, deviation = round_moments(policy)
    rounds = max(100, int(np.ceil((deviation / exact / error) ** 2 / len(seeds))))
    means = [training_time_s(policy, rounds, seed) / rounds for seed in seeds]
    return {
        "policy": policy,
        "rounds": rounds,
        "round_s": float(np.mean(means)),
        "round_s_per_seed": means,
        "expected_s": exact,
        "standard_error": deviation / exact / np.sqrt(rounds * len(seeds)),
        "mape": mape(float(np.mean(means)), exact),
        "times_faster": round_moments(VANILLA)[0] / exact,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--error", type=float, default=0.01, help="relative standard error")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=[VANILLA, *STATIC_POLICIES])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with (HERE / "order_statistics.jsonl").open("a", encoding="utf-8") as results:
        for policy in options.policies:
            line = compare(policy, options.error, range(options.seeds))
            print(json.dumps(line), file=results, flush=True)
            print("{policy:8} {round_s:.4f} s, expected {expected_s:.4f} s".format(**line))


if __name__ == "__main__":
    main()
