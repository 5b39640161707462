"""What TiFL itself costs: selection from many known nodes, and overhead over FedAvg.

Selection is everything up to the finished instructions (``configure_train`` with FedAvg
inside), timed for fleets of growing size. Overhead is timed turn by turn in one process:
FedAvg alone and FedAvg inside TiFL, the same nodes, each reply with arrays of its own. All
times are CPU time of this one process, so that others on the machine do not disturb them.
Usage: ``python benchmarks/tifl/selection_cost.py [--largest 1000000] [--nodes 1000]``; writes
``selection_cost.jsonl`` beside this file.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import quantile_tiers
from flwr_hetero.tifl.tiers import TierTable

HERE = Path(__file__).parent
PER_ROUND = 100


class Crowd(LocalGrid):
    """A grid that says it has many nodes; nobody talks to them."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(ClientApp(), [DeviceProfile()])
        self.ids = dict.fromkeys(range(num_nodes))

    def get_node_ids(self) -> Iterable[int]:
        """Return all, as a set-like view, as any LocalGrid does."""
        return self.ids.keys()


def know(strategy: TiFL, num_nodes: int) -> None:
    """Bring a strategy to where it is after profiling, without a million messages."""
    names = [f"node-{i}" for i in range(num_nodes)]
    for i in range(num_nodes):
        strategy.session.registry.set_partition_id(i, i)
    latency = np.random.default_rng(0).lognormal(size=num_nodes)
    strategy._set_tiers(TierTable(names, latency, quantile_tiers(latency, 5)))
    strategy.joiners.know(range(num_nodes))


def time_selection(num_nodes: int, rounds: int) -> dict[str, object]:
    grid = Crowd(num_nodes)
    strategy = TiFL(FedAvg(fraction_evaluate=0.0), clients_per_round=PER_ROUND, policy="random")
    know(strategy, num_nodes)
    arrays, config, times = ArrayRecord([np.zeros(1)]), ConfigRecord(), []
    for number in range(1, rounds + 1):
        start = time.process_time()
        messages = strategy.configure_train(number, arrays, config, grid)
        times.append(time.process_time() - start)
        assert len(messages) == PER_ROUND
    return {
        "what": "selection",
        "nodes": num_nodes,
        "rounds": rounds,
        "mean_ms": 1e3 * float(np.mean(times)),
        "median_ms": 1e3 * float(np.median(times)),
        "most_ms": 1e3 * max(times),
    }


def make_echo_app(megabytes: float) -> ClientApp:
    """Make nodes that answer with arrays of the right size, a copy for each reply."""
    app = ClientApp()
    model = np.random.default_rng(0).standard_normal(round(megabytes * 250_000), np.float32)

    @app.train()
    def train(message: Message, context: object) -> Message:
        arrays = ArrayRecord({"0": Array(model)})
        return _reply(message, {"arrays": arrays})

    @app.train("profile")
    def profile(message: Message, context: object) -> Message:
        return _reply(message, {})

    return app


def _reply(message: Message, records: dict[str, ArrayRecord]) -> Message:
    content = RecordDict({**records, "metrics": MetricRecord({keys.NUM_EXAMPLES: 100})})
    return Message(content, reply_to=message)


def time_round(strategy: Strategy, grid: LocalGrid, arrays: ArrayRecord) -> tuple[float, float]:
    """Return the seconds that a round took in the strategy, and in all."""
    config = ConfigRecord()
    start = time.process_time()
    messages = list(strategy.configure_train(1, arrays, config, grid))
    asked = time.process_time()
    replies = list(grid.send_and_receive(messages))
    answered = time.process_time()
    new, _ = strategy.aggregate_train(1, replies)
    end = time.process_time()
    assert new is not None
    return asked - start + end - answered, end - start


def time_overhead(num_nodes: int, megabytes: float, rounds: int) -> dict[str, object]:
    grid = LocalGrid(make_echo_app(megabytes), [DeviceProfile()] * num_nodes)
    arrays = ArrayRecord({"0": Array(np.zeros(round(megabytes * 250_000), np.float32))})
    plain = FedAvg(fraction_evaluate=0.0)
    tifl = TiFL(FedAvg(fraction_evaluate=0.0), clients_per_round=num_nodes, policy="vanilla")
    for strategy in (plain, tifl):  # warms up; TiFL also profiles
        time_round(strategy, grid, arrays)
    turns = [
        (time_round(plain, grid, arrays), time_round(tifl, grid, arrays)) for _ in range(rounds)
    ]
    times = np.array(turns)  # (rounds, FedAvg or TiFL, strategy or whole round)
    ratios = times[:, 1] / times[:, 0] - 1
    return {
        "what": "overhead",
        "nodes": num_nodes,
        "megabytes": megabytes,
        "rounds": rounds,
        "fedavg_s": np.median(times[:, 0], axis=0).tolist(),
        "tifl_s": np.median(times[:, 1], axis=0).tolist(),
        "overhead": np.median(ratios, axis=0).tolist(),
        "overhead_least": ratios.min(axis=0).tolist(),
        "overhead_most": ratios.max(axis=0).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    sizes = [n for n in (10**3, 10**4, 10**5, 10**6, 10**7) if n <= options.largest]
    with (HERE / "selection_cost.jsonl").open("w", encoding="utf-8") as results:
        for line in [
            *(time_selection(n, rounds=200) for n in sizes),
            time_overhead(options.nodes, options.megabytes, options.rounds),
        ]:
            print(json.dumps(line), file=results, flush=True)
            print(line)


if __name__ == "__main__":
    main()
