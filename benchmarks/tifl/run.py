"""The paper's experiments (section 5) on emulated fleets: every policy in every case.

50 nodes in five groups, 5 nodes a round, one local epoch with batches of 10, as in the paper;
data, model and rounds are smaller. ``fleet`` is the CPU shares of the groups, ``partition``
how the data is dealt. All devices have 3 % jitter, as real ones do; without it equal devices
could not be sorted into tiers.
Usage: ``python benchmarks/tifl/run.py DATASET [--cases ...] [--policies ...]`` with a Parquet
folder or file, a name on the Hub, or ``digits``; appends to ``results.jsonl`` beside this file,
a json line per case, policy and seed.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
from one_run import one_run

from flwr_hetero.client.device import DeviceProfile, named_fleet

HERE = Path(__file__).parent
NODES, PER_ROUND, JITTER = 50, 5, 0.03

CASES: dict[str, dict[str, Any]] = {
    "resource": {"fleet": "paper-5", "partition": "iid"},
    "quantity": {"fleet": "2 CPUs", "partition": "quantity"},
    "non-IID(2)": {"fleet": "2 CPUs", "partition": "classes", "classes-per-node": 2},
    "non-IID(5)": {"fleet": "2 CPUs", "partition": "classes", "classes-per-node": 5},
    "non-IID(10)": {"fleet": "2 CPUs", "partition": "classes", "classes-per-node": 10},
    "resource + non-IID(5)": {
        "fleet": "paper-5",
        "partition": "classes",
        "classes-per-node": 5,
    },
    "combined": {"fleet": "paper-5", "partition": "quantity-classes", "classes-per-node": 5},
}

POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in ("vanilla", "slow", "uniform", "random", "fast")},
    "adaptive": {"policy": "adaptive", "credits": None},
    "adaptive, paced": {"policy": "adaptive", "credits": "paced"},
}


def make_fleet(name: str) -> list[DeviceProfile]:
    """Make the devices of a case, with jitter."""
    if name == "2 CPUs":
        return [DeviceProfile(compute_factor=2.0, jitter=JITTER)] * NODES
    return [replace(device, jitter=JITTER) for device in named_fleet(name, NODES)]


def cut(dataset: str, train: int, test: int, folder: str) -> str:
    """Write the first rows of a Parquet data set to a folder; other data sets stay whole."""
    path = Path(dataset).expanduser()
    if not path.is_dir():
        return dataset
    for split, rows in (("train", train), ("test", test)):
        (file,) = path.glob(f"{split}*.parquet")
        pq.write_table(pq.read_table(file).slice(0, rows), Path(folder) / f"{split}.parquet")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--train-examples", type=int, default=12_000)
    parser.add_argument("--test-examples", type=int, default=1_000)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    options = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        (HERE / "results.jsonl").open("a", encoding="utf-8") as results,
    ):
        dataset = cut(options.dataset, options.train_examples, options.test_examples, folder)
        shared = {
            "dataset": dataset,
            "num-server-rounds": options.rounds,
            "batch-size": 10,
            "learning-rate": options.learning_rate,
        }
        for seed in options.seeds:
            for case in options.cases:
                deal = {key: value for key, value in CASES[case].items() if key != "fleet"}
                for policy in options.policies:
                    fleet = make_fleet(CASES[case]["fleet"])
                    run_config = {**shared, **deal, "seed": seed}
                    arguments = {
                        "clients_per_round": PER_ROUND,
                        "warmup_rounds": 0,
                        **POLICIES[policy],
                    }
                    result = one_run(run_config, fleet, **arguments)
                    line = {"case": case, "policy": policy, "rounds": options.rounds, **result}
                    line["dataset"] = Path(options.dataset).name
                    print(json.dumps(line), file=results, flush=True)
                    print(
                        f"{case:22} {policy:16} {line['accuracy'][-1]} {line['clock_s'][-1]:.0f} s"
                    )


if __name__ == "__main__":
    main()
