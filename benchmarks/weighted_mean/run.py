"""Weighted mean of 50 models of 10 MB: Flower's ``aggregate_arrayrecords`` against ours.

Both get the same records in the same process, turn by turn, and give back an ArrayRecord.
Usage: ``python benchmarks/weighted_mean/run.py [--nodes 50] [--megabytes 10] [--repeats 7]``;
writes ``results.jsonl`` beside this file, a json line per layout of the model.
"""

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flwr_hetero.server.aggregate import mean_arrays

HERE = Path(__file__).parent

LAYOUTS = {
    "one array": [1.0],
    "ResNet-like": [0.002] * 20 + [0.01] * 12 + [0.06] * 8 + [0.18, 0.18],
    "many small": [1 / 400] * 400,
}
"""Name to the parts of the model's size that each array takes."""


def make_models(
    parts: list[float], megabytes: float, nodes: int, seed: int
) -> tuple[list[RecordDict], list[float]]:
    """Make float32 models with one integer buffer each, and steps as weights."""
    rng = np.random.default_rng(seed)
    total = sum(parts)
    sizes = [max(1, round(megabytes * 1e6 / 4 * part / total)) for part in parts]
    weights = rng.integers(1, 33, nodes).astype(float).tolist()
    contents = []
    for weight in weights:
        arrays = {f"layer{i}": rng.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
        arrays["num_batches_tracked"] = np.array(int(weight))
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        contents.append(RecordDict({"arrays": record, "metrics": MetricRecord({"w": weight})}))
    return contents, weights


def seconds(call: Callable[[], ArrayRecord]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def extra_bytes(call: Callable[[], ArrayRecord]) -> int:
    """Peak of memory taken during a call, its result included."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def compare(layout: str, megabytes: float, nodes: int, repeats: int) -> dict[str, object]:
    contents, weights = make_models(LAYOUTS[layout], megabytes, nodes, seed=0)
    records = [content["arrays"] for content in contents]

    def flower() -> ArrayRecord:
        return aggregate_arrayrecords(contents, "w")

    def ours() -> ArrayRecord:
        return mean_arrays(records, weights, like=records[0])

    theirs, mine = flower(), ours()  # also warms up
    times = np.array([(seconds(flower), seconds(ours)) for _ in range(repeats)])
    ratios = times[:, 0] / times[:, 1]
    floats = [name for name in theirs if name.startswith("layer")]
    differences = [np.abs(theirs[name].numpy() - mine[name].numpy()).max() for name in floats]
    return {
        "layout": layout,
        "nodes": nodes,
        "megabytes": megabytes,
        "repeats": repeats,
        "flower_s": float(np.median(times[:, 0])),
        "ours_s": float(np.median(times[:, 1])),
        "speedup": float(np.median(ratios)),
        "speedup_least": float(ratios.min()),
        "speedup_most": float(ratios.max()),
        "flower_extra_bytes": extra_bytes(flower),
        "ours_extra_bytes": extra_bytes(ours),
        "largest_difference": float(max(differences)),
        "integer_dtype": {
            "flower": theirs["num_batches_tracked"].dtype,
            "ours": mine["num_batches_tracked"].dtype,
        },
        "flwr": version("flwr"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "results.jsonl")
    args = parser.parse_args()
    lines = []
    for layout in LAYOUTS:
        line = compare(layout, args.megabytes, args.nodes, args.repeats)
        lines.append(json.dumps(line))
        print(lines[-1])
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
